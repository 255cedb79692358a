import fuzz
from fuzz import *
def go(indirection, steady):
    ipc._steadily = STEADILY if steady else (lambda f, r: r)
    MEM.clear(); ct.MarkStepBox.mark_step_counter = 0
    m = (ct.reset_cudagraph_trees(), C._set_cached_tensors_enabled(True), new_manager())[-1]
    def mkf(i, mut):
        f = Fn(); f.idx=i; f.n=1; f.static=[]; f.mutated=mut; f.nout=1; f.alias=[]; f.viewalias=[]; f.hide=False; f.mode="inf"; f.ints=False; f.uv=False; f.kids=(10*i+1,10*i+2); return f
    real = fuzz.Settings
    fuzz.Settings = lambda a, b, c: real(a, indirection, c)
    def new(): t = mk(addr("user"), size=(4,8)); MEM[P(t)] = ("u", P(t)); return t
    f, g = mkf(1, ()), mkf(2, (0,))
    x, u = new(), new()
    F = compile_fn(f, [x]); G = compile_fn(g, [u])
    def callG(t):
        want = oracle(g, [MEM[P(t)]], 0)[1][0]
        o = G([t]); return "written" if MEM[P(t)] == want else "LOST"
    ct.mark_step_begin(); o = F([x]); callG(u)              # warm up
    for _ in range(2): ct.mark_step_begin(); o = F([x])     # record, replay
    ct.mark_step_begin(); r = [callG(o[0])]                 # g on the last step's output
    for _ in range(4): ct.mark_step_begin(); r.append(callG(new()))
    print(indirection, "steady" if steady else "general", r, "recordings of g", len(g.log.recordings))
    fuzz.Settings = real
for i in ("off", "auto"):
    for s in (False, True): go(i, s)
