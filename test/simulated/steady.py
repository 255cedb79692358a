from simbase import *
import simbase, time
from inductor_patches.cudagraph_trees import _steadily
def entry(m, log):
    model = next(w.model for w in m.ids_to_funcs.values() if w.model.log is log)
    return model
def mk_entry(m, f, log):
    return _steadily(entry(m, log), f)
STEADY = [0, 0]
orig = manager_module.Manager.replay_steadily
def counting(self, inputs, fid):
    STEADY[1] += 1
    o = orig(self, inputs, fid)
    STEADY[0] += o is not None
    return o
manager_module.Manager.replay_steadily = counting
def f1(args):
    w, x, y = args; args.clear()
    o = pool_alloc(size=(4, 8)); launch(P(w), P(x), P(y), P(o)); return [o]
def scenario(name, calls, f=f1, static=(0,), mutated=(), nout=1, steps=True, mode=M.INFERENCE, expect=None, keep=False):
    m = manager(); COPIES.clear(); STEADY[:] = 0, 0; e = None; bad = []; kept = []
    for n, args in enumerate(calls):
        args = list(args(kept) if callable(args) else args)
        if steps: ct.mark_step_begin()
        want = [P(a) if isinstance(a, torch.Tensor) else a for a in args]
        if e is None:
            f_, o, log = add(m, f, args, static=static, mutated=mutated, nout=nout, mode=mode); e = mk_entry(m, f_, log)
        else: o = e(args)
        kept[:] = [o] if keep else []
        node = m.current_node
        if isinstance(node, ct.CUDAGraphNode) and node.graph.launches:
            got = words(node.graph.launches[-1][0])[:len(want)]
            if got != want: bad.append((n, [hex(g) for g in got], [hex(g) for g in want if isinstance(g, int)], list(COPIES)))
        check(args == [], name, "consumed", n) if args else None
        del o
    print(name, "recordings", count(m), "steady", STEADY, "replays", [r.replays for r in log.recordings], "not at inputs", bad, "copies", len(COPIES))
    return m, e, log
w = user(); w2 = user(); x = user(); y = user()
scenario("same", [(w, x, y)] * 8)
scenario("fresh", [lambda k: (w, user(), user()) for _ in range(8)])
scenario("static moves", [(w, x, y)] * 4 + [(w2, x, y)] * 4 + [(w, x, y)] * 2)
scenario("misaligned", [(w, user(), y)] * 4 + [lambda k: (w, user(residue=4), y), (w, x, y), (w, x, y)])
scenario("fed back, kept", [(w, x, y)] * 3 + [lambda k: (w, k[0][0] if k else x, y) for _ in range(5)], keep=True)
scenario("no steps, output kept", [(w, x, y)] * 6, steps=False, keep=True)
scenario("no steps, outputs die", [(w, x, y)] * 6, steps=False)
scenario("mutated", [lambda k: (w, user(), user()) for _ in range(6)], mutated=(1,))
scenario("mutated misaligned", [lambda k: (w, user(), user()) for _ in range(4)] + [lambda k: (w, user(residue=8), y)], mutated=(1,))
def f2(args):
    w, x, y = args; args.clear(); o = pool_alloc(size=(4, 8)); launch(P(w), P(x), P(y), P(o)); return [o, x, y]
m, e, log = scenario("aliases", [lambda k: (w, user(), user()) for _ in range(6)], f=f2, nout=3)
ct.mark_step_begin(); a, b = user(), user(); o = e([w, a, b]); check(o[1] is a and o[2] is b, "rebuilt", STEADY)
def fi(args):
    w, x, y = args; args.clear(); o = pool_alloc(size=(4, 8)); launch(P(w), P(x), y, P(o)); return [o]
scenario("integers", [(w, x, 5)] * 6, f=fi)
scenario("forward", [(w, x, y)] * 6, mode=M.FORWARD)
# two functions, in turn
m = manager(); STEADY[:] = 0, 0; es = []
def g1(args):
    w, x, y = args; args.clear(); o = pool_alloc(size=(4, 8)); launch(P(y), P(x), P(w), P(o)); return [o]
for s in range(8):
    for i, f in enumerate((f1, g1)):
        ct.mark_step_begin(); args = [w, user(), user()]
        want = [P(a) for a in args][:: 1 if i == 0 else -1]
        if s == 0: f_, o, log = add(m, f, args, static=(0,)); es.append(mk_entry(m, f_, log))
        else: o = es[i](args)
        if m.current_node.__class__.__name__ == "Recording" and m.current_node.graph.launches: check(words(m.current_node.graph.launches[-1][0])[:3] == want, "two", s, i) if words(m.current_node.graph.launches[-1][0])[:3] != want else None
        del o
print("two functions", count(m), STEADY)
# one step, two functions in a chain: the second is no root
m = manager(); STEADY[:] = 0, 0; es = []
for s in range(8):
    ct.mark_step_begin()
    for i, f in enumerate((f1, g1)):
        args = [w, user(), user()]
        if s == 0: f_, o, log = add(m, f, args, static=(0,)); es.append(mk_entry(m, f_, log))
        else: o = es[i](args)
        if i == 0: first = o
    del o, first
print("chain", count(m), STEADY)
# the manager may go
import weakref
m = manager(); f_, o, log = add(m, f1, [w, x, y], static=(0,)); e = mk_entry(m, f_, log)
for _ in range(4): ct.mark_step_begin(); o = e([w, x, y])
r = weakref.ref(m); fm = entry(m, log); gc.disable(); 
check(fm.manager() is m, "known"); ct.reset_cudagraph_trees(); 
try: e([w, x, y]); check(False, "shut down")
except AssertionError as err: check("shutdown" in str(err), err)
del m, f_, e, o; simbase.MGR = None; globals().pop("MGR", None); check(r() is None or gc.get_referrers(r()), "manager gone", r() is None); gc.enable()
# cost
m = manager(); ws = [user() for _ in range(60)]; names = [user() for _ in range(28)]
def big(args):
    a = list(args); args.clear(); o = pool_alloc(size=(4, 8))
    for i in range(30): launch(P(a[i % 60]), P(a[60 + i % 28]), P(o))
    return [o]
f_, o, log = add(m, big, [*ws, *names], static=range(60)); e = mk_entry(m, f_, log)
for _ in range(4): ct.mark_step_begin(); o = e([*ws, *names])
node = only(m); node.graph.replay = lambda: None
api_set = simbase.API
def cost(call, sets, n=1000):
    best = 1e9
    for _ in range(5):
        t = time.perf_counter()
        for i in range(n): ct.mark_step_begin(); call([*ws, *sets[i % len(sets)]])
        best = min(best, (time.perf_counter() - t) / n * 1e6)
    return best
t0 = cost(lambda a: None, [names])
print("general same", cost(f_, [names]) - t0, "steady same", cost(e, [names]) - t0)
for i in node._live._patches._setters: node._live._patches._setters[i] = lambda: None
fresh = [[user() for _ in range(28)] for _ in range(8)]
print("general fresh, sets for nothing", cost(f_, fresh) - t0, "steady", cost(e, fresh) - t0)
