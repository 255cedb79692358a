"""The native part: all that holds of the search in Python holds of the one in C."""

from __future__ import annotations

import sys
import unittest
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import test_sites
from fake_driver import CUresult, FakeApi
from fake_native import library, native_over
from hypothesis import given
from torch.testing._internal.common_utils import TestCase, run_tests

from pygraph_trees.driver import Driver
from pygraph_trees.driver_error import DriverError
from pygraph_trees.graph_nodes import NodeKind


class _Native:
    def make_driver(self, api: FakeApi) -> Driver:
        return Driver(api, native_over(api))


class TestKernels(_Native, test_sites.TestKernels): ...


class TestHostArrays(_Native, test_sites.TestHostArrays): ...


class TestOtherNodes(_Native, test_sites.TestOtherNodes): ...


class TestFailures(_Native, test_sites.TestFailures): ...


class TestAllAtOnce(_Native, test_sites.AllAtOnce):
    @given(test_sites.GRAPHS)
    def test_sites_are_all_the_places_and_no_others(self, drawn):
        self.check_sites(drawn)


class TestSearch(TestCase):
    def setUp(self):
        super().setUp()
        self.api = FakeApi()
        self.driver = Driver(self.api, native_over(self.api))

    def test_what_it_returns(self):
        first, second = self.api.make_kernel([0x7000, 5, 0x7008], func=False), self.api.make_kernel([1])
        graph = self.api.make_graph(first, "EMPTY", second)
        found = self.driver.search(graph, 0x7000, 0x8000)
        kinds = [NodeKind.KERNEL, NodeKind.EMPTY, NodeKind.KERNEL]
        self.assertEqual(found.nodes, list(zip(self.driver.nodes(graph), kinds, strict=True)))
        self.assertEqual(found.kernels, [self.api._nodes[node].functions() for node in (first, second)])
        self.assertEqual(len(found.found), 1)
        (hits,) = found.found
        self.assertEqual((hits.position, (hits.function, hits.kernel)), (0, found.kernels[0]))
        self.assertEqual(hits.words, [(0, 0x7000), (16, 0x7008)])

    def test_many_nodes_of_few_kernels(self):
        kernel = self.api.make_kernel([0x7000, b"abc", 0x7008, b"x" * 300])
        nodes = [self.api._add(self.api._nodes[kernel]) for _ in range(200)]
        found = self.driver.search(self.api.make_graph(kernel, *nodes), 0x7000, 0x8000)
        self.assertEqual(len(found.kernels), 1)
        self.assertEqual([hits.words for hits in found.found], [[(0, 0x7000), (16, 0x7008)]] * 201)

    def test_a_graph_that_cannot_be_listed(self):
        graph = self.api.make_graph("EMPTY")
        for code, said in ((CUresult.CUDA_ERROR_OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY"), (12345, "12345")):
            self.api.fail("cuGraphGetNodes", code=code)
            with self.assertRaisesRegex(DriverError, f"^cuGraphGetNodes returned {said}$"):
                self.driver.search(graph, 0, 1)

    def test_libraries_that_lack_calls(self):
        from pygraph_trees import _native

        for name in ("no such library", "libc.so.6"):
            driver = Driver(self.api, _native, name)
            with self.assertRaises(DriverError):
                driver.search(self.api.make_graph("EMPTY"), 0, 1)

    def test_without_it_nothing_is_searched(self):
        self.assertIsNone(Driver(self.api).search(self.api.make_graph("EMPTY"), 0, 1))


class TestLibrary(TestCase):
    def test_it_can_be_built(self):
        if library() is None:
            raise unittest.SkipTest("there is no C compiler")


if __name__ == "__main__":
    run_tests()
