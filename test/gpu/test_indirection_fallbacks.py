"""What cannot be patched, or not this time: right results, a working recording and a reason in the report."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import math
import unittest
import warnings
from unittest import mock

import torch
import torch.nn.functional as F
from indirection import (
    FLAG,
    Facts,
    IndirectionTestCase,
    Program,
    assert_same_bits,
    by_name,
    compiled,
    reset,
    run,
    tensor,
)
from isolated import run_isolated
from parity import OURS
from torch.testing._internal.common_utils import instantiate_parametrized_tests, parametrize, run_tests

from pygraph_trees.driver import Driver, driver
from pygraph_trees.driver_error import DriverError
from pygraph_trees.graph_nodes import KernelNode, MemcpyNode, MemsetNode
from pygraph_trees.indirection.availability import IndirectionOff, usable_driver
from pygraph_trees.indirection.stand_ins import memory_at, tensor_in

HIDDEN = "may hide its address|host array|no node holds its address"


@torch.library.custom_op("pygraph_indirection_test::chunk_cat", mutates_args=())
def chunk_cat(xs: list[torch.Tensor]) -> torch.Tensor:
    """Hands the addresses of its inputs to its kernel in an array that is uploaded."""
    return torch._chunk_cat(xs, 0, 2)


@chunk_cat.register_fake
def _(xs: list[torch.Tensor]) -> torch.Tensor:
    return torch._chunk_cat(xs, 0, 2)


def call_driver(name, *args):
    status = getattr(ctypes.CDLL("libcuda.so.1"), name)(*args)
    if status != 0:
        raise RuntimeError(f"{name} returned {status}")


def current_stream():
    return ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)


@torch.library.custom_op("pygraph_indirection_test::host_call", mutates_args=())
def host_call(x: torch.Tensor) -> torch.Tensor:
    """Lets the host do something in between: nothing, ``free(NULL)``."""
    if x.is_cuda:
        free = ctypes.cast(ctypes.CDLL(None).free, ctypes.c_void_p)
        call_driver("cuLaunchHostFunc", current_stream(), free, None)
    return x * 2


@host_call.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("pygraph_indirection_test::cloned", mutates_args=())
def cloned(x: torch.Tensor) -> torch.Tensor:
    """A copy from device to device."""
    return x.clone()


@cloned.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("pygraph_indirection_test::zeroed", mutates_args=("x",))
def zeroed(x: torch.Tensor) -> None:
    """A fill by the driver; ``zero_`` launches a kernel."""
    nbytes = ctypes.c_size_t(x.numel() * x.element_size())
    call_driver("cuMemsetD8Async", ctypes.c_uint64(x.data_ptr()), ctypes.c_ubyte(0), nbytes, current_stream())


def all_kinds_of_nodes(x, y, c):
    zeroed(c)
    return (x.sin() @ y).relu(), cloned(y), cloned(x) + 1


def reads_freed_memory(ctx):
    api, device = Driver(importlib.import_module("cuda.bindings.driver")), torch.device("cuda", 0)
    torch.cuda.init()
    torch.zeros(1, device=device)
    nbytes = api.granularity(0)
    address, memory = api.reserve(nbytes), api.create_memory(nbytes, 0)
    api.map_memory(address, nbytes, memory)
    api.allow_access(address, nbytes, 0)
    x = tensor_in(memory_at(address, nbytes, device), (1024,), (1,), torch.float32, 0)
    f = ctx.compile(lambda x: x * 2)
    for call in range(5):
        x.fill_(call)
        torch.compiler.cudagraph_mark_step_begin()
        ctx.record(f(x))
    torch.cuda.synchronize()
    api.unmap(address, nbytes)
    torch.compiler.cudagraph_mark_step_begin()
    f(x)


PAIR = (tensor(64, 33), tensor(64, 33))
HIDING = [
    Program("address array", lambda x, y: chunk_cat([x, y]) * 2, PAIR, HIDDEN),
    Program("address array and another reader", lambda x, y: (chunk_cat([x, y]), x.sin()), PAIR, HIDDEN),
    Program("host node", lambda x: host_call(x) + 1, (tensor(1 << 16),), "a host node may hide its address"),
    Program("host node and others", lambda x, y: (host_call(x.sin()), x @ y.mT), PAIR, None),
]

RANDOM = [
    Program("dropout", lambda x: F.dropout(x, 0.5) * 2, (tensor(1 << 16),), seeded=True),
    Program("dropout around matmul", lambda x, w: F.dropout(F.dropout(x, 0.1) @ w, 0.2),
            (tensor(64, 128), tensor(128, 32)), seeded=True),
    Program("noise", lambda x: x + torch.randn_like(x) + torch.rand(65, 1, device=x.device),
            (tensor(65, 9),), seeded=True),
    Program("multinomial", lambda x: x.abs().multinomial(5, replacement=True), (tensor(16, 100),), seeded=True),
    Program("attention with dropout", lambda q, k, v: F.scaled_dot_product_attention(q, k, v, dropout_p=0.3),
            (tensor(2, 4, 128, 64, dtype="bfloat16"),) * 3, seeded=True),
    Program("trained dropout", lambda x, w: F.dropout(x * w, 0.5), PAIR, seeded=True, backward=True),
]  # fmt: skip

NODES = Program("all kinds of nodes", all_kinds_of_nodes, (tensor(64, 65), tensor(65, 32), tensor(1000)), None)
RECORDING_CALLS = [
    *("context", "granularity", "create_memory", "map_memory", "allow_access", "unmap", "release_memory"),
    *("nodes", "node_kind", "kernel_node", "memcpy_node", "memset_node", "function_name"),
]
SETTING_CALLS = [
    *((kind, name) for kind in (KernelNode, MemcpyNode, MemsetNode) for name in ("bind", "set")),
    *((kind, "set_captured") for kind in (MemcpyNode, MemsetNode)),
]


@contextlib.contextmanager
def failing(owner, name, at=None, until=None):
    """Counts the calls of a method, and lets those from number ``at`` to ``until`` (``at`` alone) fail."""
    original, own = getattr(owner, name), vars(owner).get(name)
    counted = []

    def call(self, *args):
        counted.append(name)
        if at is not None and at <= len(counted) <= (until or at):
            raise DriverError(call=name, code="INJECTED")
        return original(self, *args)

    setattr(owner, name, call)
    try:
        yield counted
    finally:
        if own is None:
            delattr(owner, name)
        else:
            setattr(owner, name, own)


class TestIndirectionFallbacks(IndirectionTestCase):
    @parametrize("program", HIDING, name_fn=by_name)
    def test_hidden_addresses(self, program):
        self.check(program)

    @parametrize("program", RANDOM, name_fn=by_name)
    def test_random_numbers(self, program):
        self.check(program)

    def test_every_kind_of_node_is_patched(self):
        kinds = (KernelNode, MemcpyNode, MemsetNode)
        with contextlib.ExitStack() as stack:
            counts = [stack.enter_context(failing(kind, "set")) for kind in kinds]
            facts = self.check(NODES)
        self.assertEqual((facts.copied_bytes, facts.why), (0, ()), str(facts))
        self.assertTrue(all(map(len, counts)), [len(count) for count in counts])

    def survives(self, owner, name):
        """Whatever call of a driver method fails, results are right, and in the end there are replays."""
        with failing(owner, name) as counted:
            run(NODES, compiled(NODES.fn), self.device)
        count = len(counted)
        self.assertGreater(count, 0)
        for at, until in [(n, n) for n in sorted({1, count})] + [(1, math.inf)]:
            if not 1 <= at <= count:
                continue
            with self.subTest(at=at, until=until):
                reset()
                with failing(owner, name, at, until), warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    run(NODES, compiled(NODES.fn), self.device)
                facts = Facts.now()
                self.assertGreater(facts.replays, 0, str(facts))
                self.assertLessEqual(facts.recordings, 4, str(facts))
                for reason in facts.why:
                    self.assertRegex(reason, r"\w+ \w+")

    @parametrize("name", RECORDING_CALLS)
    def test_failure_while_recording(self, name):
        with mock.patch.object(driver(), "native", None):
            self.survives(Driver, name)

    def test_failure_of_the_native_search(self):
        if driver().native is None:
            raise unittest.SkipTest("the native part was not built")
        self.survives(Driver, "search")

    @parametrize("kind,name", SETTING_CALLS, name_fn=lambda kind, name: f"{kind.__name__}_{name}")
    def test_failure_of_a_node(self, kind, name):
        self.survives(kind, name)

    def test_the_reason_names_the_call(self):
        with failing(Driver, "create_memory", 1, math.inf):
            run(NODES, compiled(NODES.fn), self.device)
        facts = Facts.now()
        self.assertGreater(facts.copied_bytes, 0)
        self.assertTrue(facts.why and all("create_memory returned INJECTED" in why for why in facts.why), str(facts))

    def test_a_driver_that_lacks_calls(self):
        usable_driver.cache_clear()
        self.addCleanup(usable_driver.cache_clear)
        original = Driver.missing_calls
        self.addCleanup(setattr, Driver, "missing_calls", original)
        Driver.missing_calls = lambda driver: ["cuMemCreate"]
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for program in (
                Program("one", lambda x: x.sin() + 1, PAIR[:1], None),
                Program("other", lambda x, y: x * y, PAIR, None),
            ):
                run(program, compiled(program.fn), self.device)
        told = [w for w in caught if isinstance(w.message, IndirectionOff) or w.category is IndirectionOff]
        self.assertEqual(len(told), 1, [str(w.message) for w in caught])
        self.assertIn("cuMemCreate", str(told[0].message))
        facts = Facts.now()
        self.assertEqual((facts.recordings, facts.ungraphed_calls), (2, 0), str(facts))
        self.assertEqual(facts.copied_bytes, 3 * 64 * 33 * 4)

    def test_off(self):
        with torch._inductor.config.patch("triton.pygraph_indirection", "off"):
            facts = self.check(Program("off", lambda x, y: x * y, PAIR, None))
        self.assertEqual(facts.copied_bytes, 2 * 64 * 33 * 4)

    def interrupted(self, error):
        """An exception in the model while it is captured comes out, and the function works afterwards."""
        armed = []

        @torch.library.custom_op(f"pygraph_indirection_test::raises_{error.__name__.lower()}", mutates_args=())
        def raises(x: torch.Tensor) -> torch.Tensor:
            if armed and x.is_cuda and torch.cuda.is_current_stream_capturing():
                raise error("in the model")
            return x * 2

        raises.register_fake(lambda x: torch.empty_like(x))
        graphed = compiled(lambda x: raises(x).sin()).graphed
        for call in range(8):
            armed[:] = [True] if call in (1, 2) else []
            x = torch.full((1 << 16,), float(call), device=self.device)
            torch.compiler.cudagraph_mark_step_begin()
            if armed:
                with self.assertRaisesRegex(error, "in the model"):
                    graphed(x)
            else:
                self.assertEqual(graphed(x), (x * 2).sin())
        facts = Facts.now()
        self.assertEqual((facts.recordings, facts.copied_bytes), (1, 0), str(facts))

    def test_exception_while_recording(self):
        self.interrupted(ValueError)

    def test_interrupt_while_recording(self):
        self.interrupted(KeyboardInterrupt)

    @unittest.skipUnless(torch.distributed.is_available(), "needs torch.distributed")
    def test_collectives_of_one_rank(self):
        import torch.distributed as dist
        import torch.distributed._functional_collectives as collectives

        if not dist.is_nccl_available():
            self.skipTest("needs NCCL")
        dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=self.device)
        self.addCleanup(dist.destroy_process_group)

        def gather(x, y):
            return collectives.all_gather_tensor(x, 0, dist.group.WORLD) * 2 + y

        def reduce(x, y):
            return collectives.all_reduce(x.sin(), "sum", dist.group.WORLD) + x + y

        for fn in (gather, reduce):
            with self.subTest(fn.__name__):
                self.check(Program(fn.__name__, fn, PAIR, None, graphed=False))

    def test_condition(self):
        def program(flag, x):
            return torch.cond(flag.any(), lambda x: x.sin(), lambda x: x.cos(), (x,))

        flag = tensor(1, dtype="bool", values="mask")
        self.check(Program("condition", program, (flag, tensor(64, 33)), None, graphed=False))

    def test_memory_that_was_freed(self):
        """The graph's own error, as upstream's copy has it; each ends its process."""
        found = [
            run_isolated("test_indirection_fallbacks", "reads_freed_memory", OURS, config={FLAG: flag})
            for flag in ("off", "auto")
        ]
        for child in found:
            self.assertRegex(child["lost"][1], "illegal memory access")
        self.assertEqual(found[0]["lost"], found[1]["lost"])
        self.assertEqual(found[0]["facts"], found[1]["facts"])

    def test_conjugate_views(self):
        ways = compiled(lambda x: x * 2 + 1)
        for call in range(6):
            x = torch.full((100,), complex(call, 1), device=self.device).conj()
            torch.compiler.cudagraph_mark_step_begin()
            assert_same_bits(ways.graphed(x), ways.plain(x), f"conjugate, call {call}: ")

    def test_negated_views(self):
        """Un-graphed, torch 2.11 reads the memory as it is; a copy resolves the bit."""
        graphed = compiled(lambda x: x * 2 + 1).graphed
        for call in range(6):
            x = torch.full((100,), complex(1, call), device=self.device).conj().imag
            torch.compiler.cudagraph_mark_step_begin()
            result = graphed(x)
            if call:
                self.assertEqual(result, x * 2 + 1)
        self.assertRegex(Facts.now().why[0], "negated view")

    def test_kernels_of_the_users_own(self):
        from user_kernels import added

        ways = compiled(lambda x, y: added(x, y) * 2)
        for call in range(6):
            x, y = (torch.full((10_000,), call + i, device=self.device) for i in (0.5, 1.0))
            torch.compiler.cudagraph_mark_step_begin()
            assert_same_bits(ways.graphed(x, y), ways.plain(x, y), f"call {call}")
        self.assertEqual(Facts.now().copied_bytes, 0)


instantiate_parametrized_tests(TestIndirectionFallbacks)

if __name__ == "__main__":
    run_tests()
