from simbase import *
import time, timeit
from inductor_patches.cudagraph_trees import _steadily
N = 150
m = manager(); ws = [user() for _ in range(200)]
def fwd(args):
    a = list(args); args.clear(); outs = [pool_alloc(size=(4, 8)) for _ in range(N)]
    launch(*[P(t) for t in a[-2:]], *[P(o) for o in outs[:3]]); return outs
def bwd(args):
    a = list(args); args.clear(); outs = [pool_alloc(size=(4, 8)) for _ in range(200)]
    launch(P(a[0]), P(a[-1]), P(outs[0])); return outs
ef = eb = None
T = {}
def step():
    global ef, eb
    ct.mark_step_begin()
    x = [user(), user()]
    args = [*ws, *x]
    t0 = time.perf_counter()
    if ef is None: f_, o, log = add(m, fwd, args, static=range(200), mode=M.FORWARD, nout=N); ef = _steadily(next(w.model for w in m.ids_to_funcs.values() if w.model.log is log), f_)
    else: o = ef(args)
    t1 = time.perf_counter()
    saved = list(o); del o
    args = [*ws[:60], *saved[1:], user()]; keep = saved[0]; del saved
    t2 = time.perf_counter()
    if eb is None: f_, o, log = add(m, bwd, args, static=range(60), mode=M.BACKWARD, nout=200); eb = _steadily(next(w.model for w in m.ids_to_funcs.values() if w.model.log is log), f_)
    else: o = eb(args)
    t3 = time.perf_counter()
    del o, keep
    return (t1 - t0) * 1e6, (t3 - t2) * 1e6
for _ in range(6): r = step()
ts = [step() for _ in range(100)]
print("recordings", count(m), "forward", sorted(t[0] for t in ts)[50], "backward", sorted(t[1] for t in ts)[50])
b = m.current_node; print(type(b).__name__, "managed", len(b.cudagraph_managed_idxs), "dead before", len(b.expected_dead_indices_before_graph), "after", len(b.expected_dead_indices_after_graph), "live", b._live is not None)
import cProfile, pstats
pr = cProfile.Profile(); pr.enable()
for _ in range(50): step()
pr.disable(); pstats.Stats(pr).sort_stats("tottime").print_stats(18)
