"""Draft: upstream's real trees under our Recording and Manager, on a CUDA build of torch without a GPU, with the fake driver.

Run it as a script with a Python that has a CUDA build of torch (2.11 or 2.15); prints "ok" or "FAIL" a check.
"""

import contextlib, dataclasses, gc, itertools, sys, types, warnings, struct

warnings.simplefilter("ignore")
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE / "cpu")]
import torch
import pygraph_trees
import inductor_patches

print([(s.feature, s.state, s.mismatches) for s in inductor_patches.status()])
from torch._inductor import cudagraph_trees as ct
from fake_driver import FakeApi
from pygraph_trees.driver import Driver
from pygraph_trees.indirection import availability, inputs as live_inputs
from pygraph_trees.trees import recording, manager as manager_module

C = torch._C
API = FakeApi()
DRV = Driver(API)
for m in (availability, recording, manager_module):
    m.usable_driver = lambda: DRV
recording.driver = lambda: None
DEV = torch.device("cuda", 0)
PTR = itertools.count(0x7F0000000000, 1 << 21)


def mk(ptr, size=(4, 8), stride=None, dtype=torch.float32, off=0):
    if stride is None:
        stride = []
        n = 1
        for s in reversed(size):
            stride.insert(0, n)
            n *= s
    nb = (sum((s - 1) * st for s, st in zip(size, stride)) + 1 + off) * dtype.itemsize
    m = dict(
        nbytes=nb,
        data_ptr=ptr,
        size=torch.Size(size),
        stride=tuple(stride),
        dtype=dtype,
        device=DEV,
        storage_offset=off,
    )
    return C._construct_CUDA_Tensor_From_Storage_And_Metadata(m, C._construct_storage_from_data_pointer(ptr, DEV, nb))


def user(residue=0, **k):
    return mk(next(PTR) + residue, **k)


pool_live = []
POOLSEG = []


def pool_alloc(**k):
    p = next(PTR)
    t = mk(p, **k)
    pool_live.append(ct.StorageWeakRefWrapper(t))
    POOLSEG.append(dict(address=p, total_size=1 << 20, device=0))
    return t


def check_pool(device, pool, expected):
    return {w.data_ptr() for w in pool_live if w() is not None} == set(expected)


null = lambda *a, **k: contextlib.nullcontext()
CURRENT = []


class Graph:
    def __init__(self, keep_graph=False):
        self.keep = keep_graph
        self.exec = None
        self.launches = []

    def register_generator_state(self, g):
        pass

    def raw_cuda_graph(self):
        assert self.keep
        return self.g

    def raw_cuda_graph_exec(self):
        return self.exec

    def instantiate(self):
        self.exec = API.instantiate(self.g)

    def replay(self):
        if self.exec is None:
            self.instantiate()
        self.launches.append([API.exec_parameters(self.exec, n) for n in API._graphs[self.g]])


@contextlib.contextmanager
def capture(graph, **k):
    graph.g = API.make_graph()
    CURRENT.append(graph)
    try:
        yield
    finally:
        CURRENT.pop()


def launch(*words):
    """Captures a kernel that holds these words."""
    if CURRENT:
        API._graphs[CURRENT[-1].g].append(API.make_kernel(list(words)))


class Stream:
    cuda_stream = 0

    def wait_stream(self, o):
        pass


COPIES = []
for m, n, v in [
    (torch.cuda, "synchronize", lambda *a: None),
    (torch.cuda, "device", null),
    (torch.cuda, "current_stream", lambda *a: Stream()),
    (torch.cuda, "Stream", Stream),
    (torch.cuda, "CUDAGraph", Graph),
    (torch.cuda, "graph", capture),
    (torch.cuda, "graph_pool_handle", lambda: (0, 1)),
    (torch.cuda, "memory_snapshot", lambda *a, **k: POOLSEG),
    (ct, "_use_cuda_memory_pool_manager", null),
    (ct, "clear_cublas_manager", null),
    (C, "_cuda_checkPoolLiveAllocations", check_pool),
    (C, "_cuda_getCheckpointState", lambda *a: object()),
    (ct, "_update_current_stream_external_object", null),
    (ct, "CUDAGraphCaptureControlFlowOpDispatchMode", null),
    (ct, "preserve_rng_state", null),
    (ct, "static_input", lambda x: pool_alloc(size=tuple(x.shape), stride=x.stride(), dtype=x.dtype)),
    (torch, "_foreach_copy_", lambda d, s: COPIES.extend((a.data_ptr(), b.data_ptr()) for a, b in zip(d, s))),
    (ct, "disable_conv_cache_emptying", null),
    (C, "_has_Standard_Deleter", lambda p: True),
    (C, "_cuda_cudaCachingAllocator_raw_delete", lambda p: None),
    (C, "_free_And_Remove_DeleterFn", lambda p: None),
]:
    setattr(m, n, v)


def setcp(device, state, stale, live):
    pool_live[:] = [w for w in MGR.current_node.path_live_weakrefs()]


C._cuda_setCheckpointPoolState = setcp
torch.Tensor.copy_ = lambda self, o, *a: (COPIES.append((self.data_ptr(), o.data_ptr())), self)[1]
live_inputs._copy_at = lambda t, residue: (
    COPIES.append(("tmp", t.data_ptr())),
    mk(next(PTR) + residue, size=tuple(t.shape), stride=t.stride(), dtype=t.dtype),
)[1]
C._set_cached_tensors_enabled(True)
from pygraph_trees.trees.function import FunctionModel
from pygraph_trees.coverage.log import FunctionLog, GraphLog
from pygraph_trees.settings import Settings


def manager():
    global MGR
    pool_live.clear()
    ct.reset_cudagraph_trees()
    C._set_cached_tensors_enabled(True)
    MGR = ct.CUDAGraphTreeManager(0)
    ct.get_container(0).tree_manager = MGR
    return MGR


M = ct.CompilationMode


def add(m, model, inputs, static=(), mode=M.INFERENCE, mutated=(), nout=1, indirection="auto"):
    import inspect

    log = FunctionLog("f", None, "inference", 1, {}, graph=GraphLog("f", None, "inference", ()))
    model = FunctionModel(model, Settings("off", indirection, "always"), log)
    kw = dict(
        model=model,
        inputs=inputs,
        static_input_idxs=list(static),
        stack_traces=[None] * nout,
        mode=mode,
        constants=(),
        placeholders=tuple(
            types.SimpleNamespace(name="p%d" % i, stack_trace=None, users=[], mutating_use_stack_trace="here")
            for i in range(6)
        ),
        mutated_input_idxs=mutated,
        compile_id=None,
    )
    extra = dict(
        kernel_free_cudagraph=False,
        user_visible_output_idxs=(),
        cudagraph_managed_input_rerecord_limit=5,
        cudagraph_managed_input_rerecord_action="copy",
    )
    names = inspect.signature(m.add_function).parameters
    kw.update({k: v for k, v in extra.items() if k in names})
    f, o = m.add_function(**kw)
    return f, o, log


def count(m):
    total = 0
    todo = list(m.get_roots())
    while todo:
        k = todo.pop()
        total += 1
        for c in k.children.values():
            todo.extend(c)
    return total


def only(m):
    (n,) = [n for v in m.roots.values() for n in v]
    return n


def words(params):
    return list(struct.unpack(f"<{len(params) // 8}Q", params)) if isinstance(params, (bytes, bytearray)) else params


def launched(node):
    return [[words(p) for p in l] for l in node.graph.launches]


import fake_driver


def check(cond, *msg):
    print("ok " if cond else "FAIL", *msg)


def P(t):
    return t.data_ptr()


# 1. pointwise: x, w(static) -> y ; fresh addresses
def pw(args):
    x, w = args
    args.clear()
    y = pool_alloc(size=(4, 8))
    launch(P(x), P(w), P(y), 32)
    launch(7, P(x) + 16)
    return [y]


m = manager()
w = user()
F = None
xs = []
for s in range(5):
    ct.mark_step_begin()
    x = user()
    xs.append(x)
    if F is None:
        F, o, log = add(m, pw, [x, w], static=[1])
    else:
        o = F([x, w])
    del o
n = only(m)
L = launched(n)
check(type(n).__name__ == "Recording" and n._live is not None, "recording has live inputs")
check(
    len(L) == 4
    and all(l[0][0] == P(x) and l[0][1] == P(w) and l[1][1] == P(x) + 16 and l[1][0] == 7 for l, x in zip(L, xs[1:])),
    "each launch has its address",
)
check(COPIES == [], "no copies", COPIES)
check(
    [(i.kind, i.route, i.copied_bytes) for i in n.log.inputs] == [("live", "patch", 0), ("static", None, 0)],
    n.log.inputs,
)
check(API.leaks() == [], "leaks", API.leaks())


# 2. mutated + returned as is + view
def mut(args):
    c, x = args
    args.clear()
    launch(P(c), P(x))
    return [c, torch._C._dynamo.guards._reinterpret_tensor(c, (8,), (1,), 8), pool_alloc(size=(4,))]


m = manager()
F = None
pairs = []
COPIES.clear()
for s in range(5):
    ct.mark_step_begin()
    c, x = user(), user()
    pairs.append((c, x))
    if F is None:
        F, o, log = add(m, mut, [c, x], mutated=(0,), nout=3)
    else:
        o = F([c, x])
    check(
        o[0] is c
        and o[1].data_ptr() == P(c) + 32
        and o[1].untyped_storage().data_ptr() == c.untyped_storage().data_ptr(),
        "outputs on live input",
        s,
    )
    del o
n = only(m)
check([l[0][:2] for l in launched(n)] == [[P(c), P(x)] for c, x in pairs[1:]], "mutated patched")
from torch._dynamo.utils import counters

check(
    counters["inductor"]["cudagraph_skips"] == 0 and log.runs == 2,
    "skips",
    counters["inductor"]["cudagraph_skips"],
    log.runs,
)


# 3. hidden: no site -> copy with materialised memory
def hid(args):
    a, b = args
    args.clear()
    launch(P(b))
    return [pool_alloc(size=(4,))]


m = manager()
F = None
COPIES.clear()
pairs = []
for s in range(4):
    ct.mark_step_begin()
    a, b = user(), user()
    pairs.append((a, b))
    if F is None:
        F, o, log = add(m, hid, [a, b], mutated=(0,))
    else:
        o = F([a, b])
    del o
n = only(m)
ghost = n._live.items[0].stand_in.data_ptr()
check(COPIES == [c for a, b in pairs[1:] for c in ((ghost, P(a)), (P(a), ghost))], "copied in and back", COPIES)
check(
    [(i.route, i.why_copied, i.copied_bytes) for i in n.log.inputs]
    == [("copy", "no node holds its address", 128), ("patch", None, 0)],
    n.log.inputs,
)
print("leaks while alive", API.leaks())
from pygraph_trees.coverage.text import render

F = None
n = None
m = manager()
gc.collect()
live_inputs._release_retired()
check(API.leaks() == [], "released", API.leaks())


# 4. alignment and pool
def al(args):
    (x,) = args
    args.clear()
    y = pool_alloc(size=(4, 8))
    launch(P(x), P(y))
    return [y]


m = manager()
F = None
COPIES.clear()
h = user()
seq = []
for s in range(7):
    ct.mark_step_begin()
    x = user(residue=16 if s in (3, 4) else 0) if s < 5 else h
    if F is None:
        F, o, log = add(m, al, [x])
    else:
        o = F([x])
    h = o[0]
    seq.append(P(x))
    del o, x
n = only(m)
print(
    "copies",
    [(a, hex(b)) for a, b in COPIES],
    "launch",
    [hex(l[0][0]) for l in launched(n)],
    "extra",
    n._live.extra_copies,
    [hex(s) for s in seq],
    count(m),
)


# 5. static moved
def st(args):
    x, w = args
    args.clear()
    y = pool_alloc(size=(4, 8))
    launch(P(x), P(w), P(y))
    return [y]


m = manager()
F = None
COPIES.clear()
seq = []
for s in range(7):
    ct.mark_step_begin()
    x = user()
    w = user() if s in (0, 3, 4, 5, 6) else w
    seq.append((P(x), P(w)))
    if F is None:
        F, o, log = add(m, st, [x, w], static=[1])
    else:
        o = F([x, w])
    del o
check(count(m) == 2, "recordings", count(m), [r.reason for r in log.recordings])
check(COPIES == [], "no copies")


# 6. train
def fw(args):
    (x,) = args
    args.clear()
    y = pool_alloc(size=(4,))
    launch(P(x), P(y))
    return [x, y]


def bw(args):
    x, f = args
    args.clear()
    y = pool_alloc(size=(8,))
    launch(P(x), P(f), P(y))
    return [y]


m = manager()
f = b = None
last = []
for s in range(6):
    ct.mark_step_begin()
    x = user()
    if f is None:
        f, o, lf = add(m, fw, [x], mode=M.FORWARD, nout=2)
    else:
        o = f([x])
    ins = [o[0], o[1]]
    del o
    last.append(P(ins[0]))
    if b is None:
        b, g, lb = add(m, bw, ins, static=[0], mode=M.BACKWARD)
    else:
        g = b(ins)
    del g, ins, x
print("train recordings", count(m), [r.reason for r in lf.recordings], [r.reason for r in lb.recordings])
check(counters["inductor"]["cudagraph_skips"] == 0, "skips")
# 7. off
m = manager()
F = None
COPIES.clear()
for s in range(4):
    ct.mark_step_begin()
    x = user()
    if F is None:
        F, o, log = add(m, al, [x], indirection="off")
    else:
        o = F([x])
    del o
check(len(COPIES) == 3 and only(m)._live is None and not only(m).graph.keep, "off copies", COPIES)


# 8. exceptions
class Boom(Exception):
    pass


def boom(args):
    (x,) = args
    if CURRENT:
        raise Boom
    args.clear()
    return [pool_alloc(size=(4,))]


m = manager()
F, o, log = add(m, boom, [user()])
del o
ct.mark_step_begin()
try:
    F([user()])
    check(False, "no exception")
except Boom:
    pass
check(API.leaks() == [], "leaks after exception", API.leaks())


# 9. driver failures at every call while recording
def calls_in_record():
    m = manager()
    F, o, log = add(m, pw, [user(), w0], static=[1])
    del o
    ct.mark_step_begin()
    before = len(API.calls)
    o = F([user(), w0])
    return API.calls[before:]


w0 = user()
names = calls_in_record()
import collections

cnt = collections.Counter(names)
print(cnt)
bad = 0
for name, k in cnt.items():
    for i in range(k):
        m = manager()
        COPIES.clear()
        F, o, log = add(m, pw, [user(), w0], static=[1])
        del o
        ct.mark_step_begin()
        API.fail(name, i, fake_driver.CUresult.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED)
        x = user()
        try:
            o = F([x, w0])
            del o
            ct.mark_step_begin()
            x2 = user()
            o = F([x2, w0])
            del o
            n = only(m)
            L = launched(n)
            inp = n.log.inputs[0]
            good = (
                (L[0][0][0] == P(x) and L[1][0][0] == P(x2))
                if inp.route == "patch"
                else (len([c for c in COPIES if c[1] in (P(x), P(x2))]) == 2)
            )
            if not good:
                bad += 1
                print("BAD", name, i, inp, L, COPIES)
        except Exception as e:
            bad += 1
            print("EXC", name, i, type(e).__name__, e)
        API._failures.clear()
        F = None
        n = None
        m = None
        MGR = None
print("bad", bad)
manager()
gc.collect()
live_inputs._release_retired()
print("leaks", API.leaks())
# 10. failing set at a replay
m = manager()
F = None
w = user()
for s in range(6):
    ct.mark_step_begin()
    x = user()
    if s == 4:
        API.fail("cuGraphExecKernelNodeSetParams", 1, fake_driver.CUresult.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED)
    if F is None:
        F, o, log = add(m, pw, [x, w], static=[1])
    else:
        o = F([x, w])
    del o
print(
    "after failing set",
    count(m),
    [r.reason for r in log.recordings],
    [[(l[0][0]) for l in launched(n)] for v in m.roots.values() for n in v],
)


# 11. memcpy/memset/odd layouts
def odd(args):
    a, b, c = args
    args.clear()
    y = pool_alloc(size=(4,))
    if CURRENT:
        g = API._graphs[CURRENT[-1].g]
        g.append(API.make_memcpy(P(a), P(y), 64))
        g.append(API.make_memset(P(b) + 16, 16))
        g.append(API.make_kernel([P(c) - 0, 5], packed=True))
    return [y]


m = manager()
F = None
seq = []
same = user()
for s in range(5):
    ct.mark_step_begin()
    a, b = same, user()
    c = user(size=(3, 4), stride=(0, 1), off=5)
    seq.append((P(a), P(b) + 16, P(c)))
    if F is None:
        F, o, log = add(m, odd, [a, b, c], mutated=(1,))
    else:
        o = F([a, b, c])
    del o
n = only(m)
L = [(words(l[0])[0], words(l[1])[0], words(l[2])[0]) for l in n.graph.launches]
check(L == seq[1:], "memcpy, memset, packed, expanded with offset", L, seq[1:])

# 12. no addresses for a mutated input: copied in and back, in memory of its own
m = manager()
F = None
COPIES.clear()
counters.clear()
seen = []
for s in range(5):
    ct.mark_step_begin()
    c, x = user(), user()
    seen.append(P(c))
    if s == 1:
        for n in (0, 1):
            API.fail("cuMemAddressReserve", n, fake_driver.CUresult.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED)
    if F is None:
        F, o, log = add(m, mut, [c, x], mutated=(0,), nout=3)
    else:
        o = F([c, x])
    check(o[0] is c, "returned as it is", s)
    del o
back = [a for a, b in COPIES if a in seen]
check(
    count(m) == 1 and log.runs == 2 and back == seen[1:] and counters["inductor"]["cudagraph_skips"] == 0,
    "held",
    count(m),
    log.runs,
    back,
)


# 13. a model that fails at ghost addresses alone is recorded once more, on memory
def picky(args):
    c, x = args
    if CURRENT and DRV and any(0x2B6D00000000 <= P(t) < 0x2B7D00000000 for t in args):
        left_behind = pool_alloc(size=(4,))
        raise Boom("no ghosts")
    args.clear()
    launch(P(c), P(x))
    return [pool_alloc(size=(4,))]


for mutated in ((), (0,)):
    m = manager()
    F = None
    COPIES.clear()
    firsts = []
    for s in range(4):
        ct.mark_step_begin()
        c, x = user(), user()
        firsts.append(P(c))
        if F is None:
            F, o, log = add(m, picky, [c, x], mutated=mutated)
        else:
            o = F([c, x])
        del o
    n = only(m)
    check(log.runs == 3 and n._kept == [] and len(n.graph.launches) == 3, "recorded once more", log.runs)
    check([i.route for i in n.log.inputs] == ["copy", "copy"] and "Boom" in n.log.inputs[1].why_copied, n.log.inputs)
    check([a for a, b in COPIES if a in firsts] == (firsts[1:] if mutated else []), "copied back")
    check(len({b for a, b in COPIES if b in firsts}) >= 3, "copied in")
n = m = F = None

# 14. no memory for a copy at its ghost address: recorded once more, on memory
m = manager()
COPIES.clear()
F, o, log = add(m, hid, [user(), user()], mutated=(0,))
del o
ct.mark_step_begin()
for i in range(1, 9):
    API.fail("cuMemCreate", i, fake_driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY)
a, b = user(), user()
o = F([a, b])
del o
API._failures.clear()
check([i.route for i in only(m).log.inputs] == ["copy", "copy"], only(m).log.inputs)
check([c for c in COPIES if c[0] == P(a)] != [], "copied back")

# 15. a mutated static input that moves, of a graph whose writes are not known, stays static
for known in (True, False):
    m = manager()
    F = None
    counters.clear()
    COPIES.clear()
    for s in range(6):
        ct.mark_step_begin()
        c, x = user(), user()
        if F is None:
            F, o, log = add(m, mut, [c, x], static=[0], mutated=(0,), nout=3)
            log.graph = log.graph if known else None
        else:
            o = F([c, x])
        del o
    check(
        counters["inductor"]["cudagraph_skips"] == 0 and log.runs == 1 + count(m),
        "moved and mutated",
        count(m),
        log.runs,
    )
    check(count(m) == (2 if known else 5), "recordings", count(m))

# 16. a recording whose static inputs moved for good is not given addresses at each call
m = manager()
F = None
w1, w2 = user(), user()
for s in range(7):
    ct.mark_step_begin()
    x, w = user(), w1 if s < 3 else w2
    if F is None:
        F, o, log = add(m, st, [x, w], static=[1])
    else:
        o = F([x, w])
    del o
first, second = next(iter(m.roots.values()))
check(
    first._live._patches.set_calls == 3 and second._live._patches.set_calls == 4,
    first._live._patches.set_calls,
    second._live._patches.set_calls,
)
check(len(first.graph.launches) == 2 and len(second.graph.launches) == 4, "launches")
