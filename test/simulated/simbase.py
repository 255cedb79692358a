"""Draft: upstream's real trees under our Recording and Manager, on a CUDA build of torch without a GPU, with the fake driver.

Run it as a script with a Python that has a CUDA build of torch (2.11 or 2.15); prints "ok" or "FAIL" a check.
"""

import contextlib, dataclasses, gc, itertools, sys, types, warnings, struct

warnings.simplefilter("ignore")
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1]), str(HERE.parents[1] / "test" / "cpu")]
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
live_inputs.copy_at = lambda t, residue: (
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
    MGR = ct.get_container(0).get_tree_manager()  # as upstream makes it
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
    names = inspect.signature(type(m).__mro__[1].add_function).parameters
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


