"""Driver calls that fail, one by one, and an interrupt during a capture.

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
from indirection import ByTable, Facts, IndirectionTestCase, Program, compiled, reset, run, tensor
from torch.testing._internal.common_utils import instantiate_parametrized_tests, parametrize, run_tests
from user_operators import cloned, zeroed

from pygraph_trees.cuda.copy_nodes import MemcpyNode, MemsetNode
from pygraph_trees.cuda.driver import Driver, driver
from pygraph_trees.cuda.graph_nodes import KernelNode
from pygraph_trees.errors import DriverError


def all_kinds_of_nodes(x, y, c):
    zeroed(c)
    return (x.sin() @ y).relu(), cloned(y), cloned(x) + 1


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

    def test_interrupt_while_recording(self):
        """An interrupt in the model during its capture reaches the caller, and the function works afterwards."""
        armed = []

        @torch.library.custom_op("pygraph_indirection_test::interrupted", mutates_args=())
        def interrupted(x: torch.Tensor) -> torch.Tensor:
            if armed and x.is_cuda and torch.cuda.is_current_stream_capturing():
                raise KeyboardInterrupt("in the model")
            return x * 2

        interrupted.register_fake(lambda x: torch.empty_like(x))
        graphed = compiled(lambda x: interrupted(x).sin()).graphed
        for call in range(8):
            armed[:] = [True] if call in (1, 2) else []
            x = torch.full((1 << 16,), float(call), device=self.device)
            torch.compiler.cudagraph_mark_step_begin()
            if armed:
                with self.assertRaisesRegex(KeyboardInterrupt, "in the model"):
                    graphed(x)
            else:
                self.assertEqual(graphed(x), (x * 2).sin())
        facts = Facts.now()
        self.assertEqual((facts.recordings, facts.copied_bytes), (1, 0), str(facts))


if __name__ == "__main__":
    run_tests()
