import os, random, sys, traceback, zlib
sys.setrecursionlimit(3000)
from simbase import *
import simbase
import inductor_patches.cudagraph_trees as ipc
from torch._inductor import utils as iu
from torch._dynamo.utils import counters
import logging
logging.disable(logging.CRITICAL)
torch._logging.set_logs()
try:
    from torch._inductor.cudagraph_trees import GenerationTracker
except ImportError:
    from torch._dynamo.mutation_guard import GenerationTracker

MEM = {}
NEXT = {"pool": 0, "user": 0, "tmp": 0, "kid": 0}
BASE = {"pool": 0x7A0000000000, "user": 0x7B0000000000, "tmp": 0x7C0000000000}
def addr(kind):
    NEXT[kind] += 1
    return BASE[kind] + NEXT[kind] * (1 << 21)
def H(*v): return zlib.crc32(repr(v).encode())
def cp(dst, src):
    MEM[dst] = MEM.get(src, ("?", src))
COUNT = {}
def note(k, n=1): COUNT[k] = COUNT.get(k, 0) + n

def pool_alloc(**k):
    p = addr("pool"); t = mk(p, **k)
    pool_live.append(ct.StorageWeakRefWrapper(t))
    POOLSEG.append(dict(address=p, total_size=1 << 20, device=0))
    return t
simbase.pool_alloc = pool_alloc
ct.static_input = lambda x: pool_alloc(size=tuple(x.shape), stride=x.stride(), dtype=x.dtype)
def fe(d, s):
    for a, b in zip(d, s): cp(a.data_ptr(), b.data_ptr())
torch._foreach_copy_ = fe
def tcopy(self, o, *a):
    cp(self.data_ptr(), o.data_ptr()); return self
torch.Tensor.copy_ = tcopy
def copy_at(t, residue):
    p = addr("tmp") + residue
    c = mk(p, size=tuple(t.shape), stride=t.stride(), dtype=t.dtype)
    cp(p, t.data_ptr()); note("copy_at"); return c
live_inputs.copy_at = copy_at
def cps(x):
    p = addr("tmp"); c = mk(p, size=tuple(x.shape), stride=x.stride(), dtype=x.dtype)
    cp(p, x.data_ptr()); note("clone"); return c
iu.clone_preserve_strides = cps
if hasattr(ct, "copy_strided_storage_"): pass
_empty = torch.empty
def empty(*size, **k):
    d = k.get("device")
    if d is not None and "cuda" in str(d):
        sz = size[0] if size and isinstance(size[0], (tuple, list)) else size
        dt = k.get("dtype") or torch.float32
        return mk(addr("tmp"), size=tuple(sz), dtype=dt)
    return _empty(*size, **k)
torch.empty = empty
HIDDEN = {}   # node handle -> words
REPLAY_FAIL = [False]
def execute(words):
    kid, nin, nout = words[0], words[1], words[2]
    ins = [MEM.get(p, ("?", p)) for p in words[3:3 + nin]]
    for j, p in enumerate(words[3 + nin: 3 + nin + nout]):
        MEM[p] = H(kid, j, ins)
def replay(self):
    if REPLAY_FAIL[0]:
        REPLAY_FAIL[0] = False
        raise RuntimeError("launch failed")
    if self.exec is None: self.instantiate()
    self.launches.append(1)
    for n in API._graphs[self.g]:
        if n in HIDDEN: execute(HIDDEN[n]); continue
        if int(API._nodes[n].kind) != 0: continue
        execute(words(API.exec_parameters(self.exec, n)))
Graph.replay = replay
POOLID = itertools.count(5)
torch.cuda.graph_pool_handle = lambda: (0, next(POOLID))
C._cuda_checkPoolLiveAllocations = lambda *a: True
def setcp(device, state, stale, live): pass
C._cuda_setCheckpointPoolState = setcp
STEADY = [0, 0]
_rs = manager_module.Manager.replay_steadily
def counting(self, inputs, fid):
    STEADY[1] += 1
    o = _rs(self, inputs, fid)
    STEADY[0] += o is not None
    return o
manager_module.Manager.replay_steadily = counting

def kernel(kid, ins, outs, hide):
    ws = [kid, len(ins), len(outs), *ins, *outs]
    if CURRENT:
        g = API._graphs[CURRENT[-1].g]
        if hide:
            n = API._make_kind("HOST", None); HIDDEN[n] = ws; g.append(n)
        else:
            g.append(API.make_kernel(ws))
    else: execute(ws)

class Fn:
    pass
def make_fn(rng, idx):
    f = Fn(); f.idx = idx
    f.n = rng.choice([1, 2, 3, 3, 4])
    f.static = [i for i in range(f.n) if rng.random() < .3]
    f.mutated = tuple(i for i in range(f.n) if rng.random() < .15)
    f.nout = rng.choice([1, 1, 2])
    f.alias = [i for i in range(f.n) if rng.random() < .1]
    f.viewalias = [i for i in range(f.n) if rng.random() < .07]
    f.hide = rng.random() < .15
    f.mode = rng.choice(["inf", "inf", "fwd", "bwd"])
    f.ints = rng.random() < .08
    f.uv = rng.random() < .2
    f.kids = (next(itertools.count(H(idx, "a") % 1000 + 10)), H(idx, "b") % 1000 + 2000)
    f.odd = rng.random() < .15   # does its first example come misaligned
    return f
def model_of(f):
    def model(args):
        args = list_args = list(args_ := args); args_.clear() if isinstance(args_, list) else None
        ts = [a for a in args if isinstance(a, torch.Tensor)]
        k = sum(a for a in args if isinstance(a, int))
        ptr = [P(t) for t in ts]
        outs = [pool_alloc(size=(4, 8)) for _ in range(f.nout)]
        kernel(f.kids[0] + 7 * k, ptr, [P(outs[0])], f.hide)
        muts = [P(ts[i]) for i in f.mutated]
        kernel(f.kids[1] + 7 * k, [P(outs[0]), *ptr[:2]], [*[P(o) for o in outs[1:]], *muts], False)
        return [*outs, *[ts[i] for i in f.alias], *[ts[i].as_strided((2, 7), (8, 1)) for i in f.viewalias]]
    return model
def oracle(f, vals, k):
    o0 = H(f.kids[0] + 7 * k, 0, list(vals))
    i2 = [o0, *vals[:2]]
    outs = [o0] + [H(f.kids[1] + 7 * k, j, i2) for j in range(f.nout - 1)]
    muts = {i: H(f.kids[1] + 7 * k, f.nout - 1 + j, i2) for j, i in enumerate(f.mutated)}
    after = [muts.get(i, v) for i, v in enumerate(vals)]
    return outs + [after[i] for i in f.alias + f.viewalias], muts

def compile_fn(f, example):
    log = FunctionLog("f%d" % f.idx, None, f.mode, 1, {}, graph=GraphLog("f", None, "inference", ()))
    model = FunctionModel(model_of(f), Settings("off", "auto", "always"), log)
    f.model, f.log = model, log
    ph = tuple(types.SimpleNamespace(name="p%d" % i, stack_trace=None, users=[], mutating_use_stack_trace="here") for i in range(6))
    nout = f.nout + len(f.alias) + len(f.viewalias)
    kw = dict(device_index=0, is_backward=f.mode == "bwd", is_inference=f.mode == "inf",
              stack_traces=[None] * nout, constants=(), placeholders=ph, mutated_input_idxs=f.mutated, compile_id=None)
    import inspect
    if "user_visible_output_idxs" in inspect.signature(ct.cudagraphify).parameters and f.uv:
        kw["user_visible_output_idxs"] = tuple(range(f.nout))
    return ct.cudagraphify_impl(model, list(example), tuple(f.static), **kw)

def new_manager():
    pool_live.clear(); POOLSEG.clear()
    m = ct.CUDAGraphTreeManager(0); ct.get_container(0).tree_manager = m; simbase.MGR = m
    return m

def state(m):
    cn = m.current_node
    return (None if cn is None else (type(cn).__name__, cn.id.id), str(m.path_state), m.current_gen, str(m.mode),
            m.running_forwards_with_pending_backwards, None if m.roots is None else count(m), m.debug_fail_counter)

def scenario(seed, steady, nops):
    rng = random.Random(seed)
    MEM.clear(); HIDDEN.clear(); REPLAY_FAIL[0] = False; API._failures.clear()
    for k in NEXT: NEXT[k] = 0
    ipc._steadily = STEADILY if steady else (lambda function, run: run)
    ct.reset_cudagraph_trees(); C._set_cached_tensors_enabled(True)
    ct.MarkStepBox.mark_step_counter = 0
    use_marks = rng.random() < .6
    GenerationTracker.generation = 0
    m = new_manager(); trace = []; bad = []
    nf = rng.choice([1, 2, 3])
    fs = [make_fn(rng, i) for i in range(nf)]
    uniq = itertools.count(1)
    def user(residue=0):
        t = mk(addr("user") + residue, size=(4, 8)); MEM[P(t)] = ("u", next(uniq)); return t
    kept = []   # (tensor)
    bufs = {}
    entries = {}
    pat = [rng.choice(range(nf)) for _ in range(rng.choice([1, 2, 3, 4]))]
    pk = {i: [rng.choice(["fixed", "fixed", "fresh", "fresh", "ring", "ring", "out", "misout", "mis"]) for _ in range(4)] for i in range(nf)}
    calm = rng.choice([(.002,.004,.0045,.006,.055),(.006,.012,.013,.016,.056),(.012,.02,.025,.03,.06)]); wild = rng.choice([.0,.02, .1, .3]); drop_all = rng.random() < .6; step_p = rng.choice([.0, .5, 1, 1])
    pos = 0
    uninst = False
    for op in range(nops):
        r = rng.random()
        if r < calm[0]:
            API.fail("cuGraphExecKernelNodeSetParams", rng.randrange(2)); continue
        if r < calm[1]:
            REPLAY_FAIL[0] = True; continue
        if r < calm[2] and entries:
            ct.reset_cudagraph_trees(); C._set_cached_tensors_enabled(True)
            for i, e in entries.items():   # old ones fail
                pass
            if rng.random() < .8: entries.clear(); kept.clear(); 
            m = new_manager(); continue
        if r < calm[3] and not uninst:
            inductor_patches.uninstall(); uninst = True; continue
        if r < .05 and uninst:
            inductor_patches.install(); uninst = False; continue
        if r < calm[4] and bufs:
            k = rng.choice(sorted(bufs)); bufs[k] = user(); continue
        if r < .075: m.set_to_running_backward() if hasattr(m, "set_to_running_backward") else None; continue
        if r < .1 and kept:
            del kept[rng.randrange(len(kept))]; continue
        # a call
        if pos % len(pat) == 0 and rng.random() < step_p:
            if use_marks: ct.mark_step_begin()
            else: GenerationTracker.generation += 1
            if drop_all: kept.clear()
        i = pat[pos % len(pat)] if rng.random() > wild else rng.randrange(nf)
        pos += 1
        f = fs[i]; args = []; spec = []
        for a in range(f.n):
            kind = pk[i][a] if rng.random() > wild else rng.choice(["fixed", "fresh", "out", "misout", "mis", "ring"])
            q = rng.random(); res = rng.choice([4, 8, 16, 64, 256]); ringi = rng.randrange(3)
            if a in f.static and rng.random() > wild / 3: kind = "fixed"
            if i not in entries and not f.odd and kind in ("mis", "misout") and rng.random() < .8: kind = "fixed"
            if kind in ("out", "misout") and not kept: kind = "fresh"
            spec.append(kind)
            if kind == "fixed":
                if (i, a) not in bufs: bufs[i, a] = user()
                args.append(bufs[i, a])
            elif kind == "ring":
                if (i, a, ringi) not in bufs: bufs[i, a, ringi] = user()
                args.append(bufs[i, a, ringi])
            elif kind == "fresh": args.append(user())
            elif kind == "mis": args.append(user(res))
            else:
                o = kept[int(q * len(kept))]
                try: P(o)
                except RuntimeError:
                    if rng.random() < .97: o = user()
                if kind == "misout":
                    try:
                        v = o.as_strided((4, 7), (8, 1), o.storage_offset() + 1)
                        MEM[P(v)] = ("v", MEM.get(P(o)))
                        o = v
                    except RuntimeError as e: pass
                args.append(o)
                del o
                v = None
        k = 0
        if f.ints: k = rng.choice([1, 2, 3]); args.append(k)
        try:
            ptrs = [P(a) for a in args[:f.n]]
            if len(set(ptrs)) < len(ptrs): del args; continue    # AOT removes duplicates
            if any(p // (1 << 21) == q // (1 << 21) for x, p in enumerate(ptrs) for q in ptrs[:x]) and (f.mutated): del args; continue
            vals = [MEM.get(p, ("?", p)) for p in ptrs]
            want, muts = oracle(f, vals, k)
        except RuntimeError as e:
            vals = None
        mutt = {x: args[x] for x in f.mutated}
        first = i not in entries
        try:
            if first: entries[i] = compile_fn(f, args)
            out = entries[i](args)
            got = [MEM.get(P(o), ("?", P(o))) for o in out]
            gm = {x: MEM.get(P(t)) for x, t in mutt.items()}
            if vals is not None and got != want: bad.append((op, "outputs", i, spec, got, want))
            if vals is not None and gm != muts: bad.append((op, "mutated", i, spec, gm, muts))
            if args: bad.append((op, "not consumed", i, spec))
            keep = rng.random()
            res = (tuple(got), tuple(sorted(gm.items())))
            if keep < .6: kept.extend(out)
            if len(kept) > 6: del kept[: len(kept) - 6]
            del out
        except (RuntimeError, AssertionError, Exception) as e:
            if isinstance(e, KeyboardInterrupt): raise
            rng.random()
            res = (type(e).__name__, str(e)[:70] or "".join(traceback.format_tb(e.__traceback__)[-1:]).split(chr(10))[0][-60:]); note("exc " + res[0] + res[1][:70])
            if os.environ.get("TB"): traceback.print_exc()
            e.__traceback__ = None
            try: del out
            except NameError: pass
        finally:
            del args, mutt
        vis = []
        for t in kept:
            try: vis.append(MEM.get(P(t)))
            except RuntimeError as e: vis.append("dead")
        t = None
        trace.append((op, i, tuple(spec), first, res, state(m), tuple(vis), tuple(g.replays for g in f.log.recordings) if hasattr(f, "log") else ()))
    if uninst: inductor_patches.install()
    return trace, bad
STEADILY = ipc._steadily

if __name__ == "__main__":
    a, b = int(sys.argv[1]), int(sys.argv[2]); n = int(sys.argv[3]) if len(sys.argv) > 3 else 60
    nb = nd = 0
    for seed in range(a, b):
        t1, b1 = scenario(seed, True, n)
        t0, b0 = scenario(seed, False, n)
        if b1 or b0:
            nb += 1
            if nb < 6: print("BAD", seed, "steady", b1[:2], "general", b0[:2])
        d = next(((x, y) for x, y in zip(t1, t0) if x != y), None)
        if d:
            x, y = d
            if x[4] == y[4] and x[5][1:] == y[5][1:] and x[6] == y[6]: note("DIFF other recording"); d = None
            elif x[4] == y[4] and "overwritten" in str(x[4][1]): note("DIFF after dead input"); d = None
        if d:
            nd += 1
            if nd < 8:
                print("DIFF", seed)
                for u, v in zip(*d):
                    if u != v: print("   steady ", u); print("   general", v)
                    else: print("   same", u)
    print("seeds", a, b, "bad", nb, "diff", nd, "steady", STEADY, {k: v for k, v in sorted(COUNT.items(), key=lambda x: -x[1])[:14]})
