"""Driver calls that fail, one by one, and models that fail during their capture.

After each failure results are right, the recording works, and the report gives the reason. Failures are injected into
the driver's methods.
"""

from __future__ import annotations

import contextlib
import math
import unittest
import warnings
from unittest import mock

import torch
from indirection import FLAG, ByTable, Facts, IndirectionTestCase, Program, compiled, reset, run, tensor
from isolated import run_isolated
from parity import OURS, UPSTREAM
from torch.testing._internal.common_utils import instantiate_parametrized_tests, parametrize, run_tests
from user_operators import cloned, zeroed

from pygraph_trees.cuda.availability import IndirectionOff, usable_driver
from pygraph_trees.cuda.copy_nodes import MemcpyNode, MemsetNode
from pygraph_trees.cuda.driver import Driver, SetRefused, driver
from pygraph_trees.cuda.graph_nodes import KernelNode
from pygraph_trees.errors import DriverError


def all_kinds_of_nodes(x, y, c):
    zeroed(c)
    return (x.sin() @ y).relu(), cloned(y), cloned(x) + 1


@torch.library.custom_op("pygraph_indirection_test::greedy", mutates_args=())
def greedy(x: torch.Tensor) -> torch.Tensor:
    """Takes 1 GiB for a while during a capture, and nothing when it runs."""
    if x.is_cuda and torch.cuda.is_current_stream_capturing():
        torch.empty(1 << 30, dtype=torch.uint8, device=x.device)
    return x * 2


@greedy.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def runs_out_of_memory(ctx):
    """Runs twice with too little memory for a recording."""
    total = torch.cuda.get_device_properties(0).total_memory
    f = ctx.compile(lambda x: greedy(x + 1).sin())
    for call in range(8):
        x = torch.full((1 << 20,), float(call), device=ctx.device)
        torch.compiler.cudagraph_mark_step_begin()
        if call in (1, 2):
            torch.cuda.set_per_process_memory_fraction(2**29 / total)
            ctx.attempt(f, x)
            torch.cuda.set_per_process_memory_fraction(1.0)
        else:
            ctx.record(f(x))
    if ctx.side == OURS:
        facts = Facts.now()
        ctx.fact("ours", [facts.recordings, facts.replays, facts.copied_bytes])


PAIR = (tensor(64, 33), tensor(64, 33))
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
    """Counts the calls of a method; those from number ``at`` to ``until``, by default only ``at``, fail."""
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


def set_one_by_one():
    """Sets kernel nodes one by one through the driver's bindings, as without the native modules."""
    return mock.patch.object(Driver, "set_kernels", lambda driver, exec_, nodes: None)


class TestEachFailure(IndirectionTestCase):
    def test_every_kind_of_node_is_patched(self):
        kinds = (KernelNode, MemcpyNode, MemsetNode)
        with contextlib.ExitStack() as stack:
            stack.enter_context(set_one_by_one())
            counts = [stack.enter_context(failing(kind, "set")) for kind in kinds]
            facts = self.check(NODES)
        self.assertEqual((facts.copied_bytes, facts.why), (0, ()), str(facts))
        self.assertTrue(all(map(len, counts)), [len(count) for count in counts])

    def survives(self, owner, name):
        """Results are right whichever call of a driver method fails, and in the end there are replays."""
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
        with mock.patch.object(driver(), "reader", None):
            self.survives(Driver, name)

    def test_failure_of_the_native_search(self):
        if driver().reader is None:
            raise unittest.SkipTest("the native part was not built")
        self.survives(Driver, "search")

    @parametrize("kind,name", SETTING_CALLS, name_fn=lambda kind, name: f"{kind.__name__}_{name}")
    def test_failure_of_a_node(self, kind, name):
        with set_one_by_one():
            self.survives(kind, name)

    @parametrize("at", [1, 2, 4])
    def test_failure_of_all_kernels_at_once(self, at):
        """Setting all kernels may fail at the recording or at a replay; the first call is at the recording."""
        if driver().reader is None:
            raise unittest.SkipTest("the native part was not built")
        original, calls = Driver.set_kernels, []

        def counting(self, exec_, nodes):
            set_all = original(self, exec_, nodes)

            def set_or_refuse():
                calls.append(1)
                set_all()
                if len(calls) == at:
                    raise SetRefused(call=KernelNode.set_call, code="INJECTED", position=len(nodes) - 1)

            return set_or_refuse

        with mock.patch.object(Driver, "set_kernels", counting):
            run(NODES, compiled(NODES.fn), self.device)
        self.assertGreaterEqual(len(calls), at)
        facts = Facts.now()
        self.assertGreater(facts.replays, 0, str(facts))
        self.assertLessEqual(facts.recordings, 2, str(facts))
        self.assertTrue(any("INJECTED" in why for why in facts.why), str(facts))


instantiate_parametrized_tests(TestEachFailure)


class TestEachFailureByTable(ByTable, TestEachFailure):
    """Results are right whichever call fails while a table is recorded and used."""


class TestIndirectionFailures(IndirectionTestCase):
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

    def interrupted(self, error):
        """An exception in the model during its capture reaches the caller, and the function works afterwards."""
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

    def test_out_of_memory_while_recording(self):
        """Calls run un-graphed, which takes less memory; upstream raises. Later calls are graphed without copies."""
        upstream = run_isolated("test_indirection_failures", "runs_out_of_memory", UPSTREAM)
        config = {FLAG: self.indirection}
        ours = run_isolated("test_indirection_failures", "runs_out_of_memory", OURS, config=config)
        self.assertEqual([kind for kind, _ in upstream["errors"]], ["torch.OutOfMemoryError"] * 2)
        self.assertEqual(ours["errors"], [])
        facts = ours["facts"]
        self.assertEqual([facts[path] for path in sorted(facts) if "(ours)[" in path], [1, 4, 0])

    def test_exception_while_recording(self):
        self.interrupted(ValueError)

    def test_interrupt_while_recording(self):
        self.interrupted(KeyboardInterrupt)


if __name__ == "__main__":
    run_tests()
