from simbase import *
import time, timeit
from inductor_patches.cudagraph_trees import _steadily
m = manager(); ws = [user() for _ in range(60)]; names = [user() for _ in range(28)]
def big(args):
    a = list(args); args.clear(); o = pool_alloc(size=(4, 8))
    for i in range(30): launch(P(a[i % 60]), P(a[60 + i % 28]), P(o))
    return [o]
f_, o, log = add(m, big, [*ws, *names], static=range(60))
model = next(w.model for w in m.ids_to_funcs.values()); e = _steadily(model, f_)
for _ in range(6): ct.mark_step_begin(); o = e([*ws, *names])
node = only(m); node.graph.replay = lambda: None; live = node._live; p = live._patches
for i in p._setters: p._setters[i] = lambda: None
inputs = [*ws, *names]; fresh = [[*ws, *[user() for _ in range(28)]] for _ in range(8)]
def t(s, n=20000, **k):
    print(f"{min(timeit.repeat(s, globals={**globals(), **k}, number=n, repeat=5)) / n * 1e6:7.3f} us  {s}")
t("torch._C._tensors_data_ptrs_at_indices_equal(inputs, node.static_input_data_ptrs, node._checked)")
t("[inputs[i].data_ptr() for i in live._indices]")
t("live.prepare(inputs)"); t("node.takes(inputs)"); t("live._apply(live._seen, inputs)")
t("p.apply(live._addresses)"); t("m.try_end_curr_execution()"); t("m.update_generation()"); t("node.reconstruct_outputs()"); t("node.run_graph()")
t("m.current_node"); t("m.current_node = node"); t("live.is_plain")
seen = [x.data_ptr() for x in fresh[0][60:]]; 
t("live._find_addresses(seen, inputs, None)"); t("p._write(range(28), seen)")
import itertools
c = itertools.cycle(fresh)
t("live.prepare(next(c))", 2000, c=c)
print(len(p._entries), len(p._setters), len(node.static_input_idxs))
