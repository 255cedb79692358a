"""The driver's calls, on a driver that checks its callers."""

from __future__ import annotations

import sys
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from fake_driver import FakeApi
from hypothesis import given
from hypothesis import strategies as st
from torch.testing._internal.common_utils import TestCase, run_tests

from pygraph_trees import driver as driver_module
from pygraph_trees.driver import Driver, DriverError, NodeKind


class TestDriver(TestCase):
    def setUp(self):
        super().setUp()
        self.api = FakeApi()
        self.driver = Driver(self.api)

    def test_counts_nodes_with_child_graphs(self):
        child = self.api.make_graph("KERNEL", "MEMSET")
        graph = self.api.make_graph("KERNEL", "GRAPH", "MEMCPY", "CONDITIONAL", children={1: child})
        counts = self.driver.count_nodes(graph)
        self.assertEqual(counts, {NodeKind.KERNEL: 2, NodeKind.MEMSET: 1, NodeKind.MEMCPY: 1, NodeKind.OTHER: 1})

    def test_empty_graph(self):
        self.assertEqual(self.driver.count_nodes(self.api.make_graph()), {})
        self.assertEqual(self.api.calls, ["cuGraphGetNodes"])

    @given(st.lists(st.sampled_from(["KERNEL", "MEMCPY", "MEMSET", "HOST", "EMPTY"]), max_size=40))
    def test_counts_are_those_of_the_graph(self, kinds):
        api = FakeApi()
        counts = Driver(api).count_nodes(api.make_graph(*kinds))
        self.assertEqual({k.name: n for k, n in counts.items()}, {k: kinds.count(k) for k in set(kinds)})

    def test_capturing_graph(self):
        stream, graph = self.api.make_stream(), self.api.make_graph("KERNEL")
        self.assertIsNone(self.driver.capturing_graph(stream))
        self.api.capture(stream, graph)
        self.assertEqual(self.driver.capturing_graph(stream), graph)
        self.api.capture(stream, graph, "INVALIDATED")
        self.assertIsNone(self.driver.capturing_graph(stream))

    def test_each_failing_call_raises(self):
        graph = self.api.make_graph("KERNEL", "KERNEL")
        for call, after in (("cuGraphGetNodes", 0), ("cuGraphGetNodes", 1), ("cuGraphNodeGetType", 1)):
            self.api.fail(call, after)
            with self.assertRaisesRegex(DriverError, f"^{call} returned CUDA_ERROR_INVALID_VALUE$"):
                self.driver.count_nodes(graph)
        self.assertEqual(self.driver.count_nodes(graph), {NodeKind.KERNEL: 2})

    def test_fake_checks_its_callers(self):
        with self.assertRaises(AssertionError):
            self.driver.nodes(0xDEAD)
        with self.assertRaises(AssertionError):
            self.api.cuGraphGetNodes(self.api.make_graph("KERNEL"), 5)

    def test_absent_bindings(self):
        driver_module.driver.cache_clear()
        try:
            with mock.patch.dict(sys.modules, {"cuda.bindings.driver": None}):
                self.assertIsNone(driver_module.driver())
        finally:
            driver_module.driver.cache_clear()


if __name__ == "__main__":
    run_tests()
