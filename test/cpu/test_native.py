"""The parts in C++: whether they are used, what replaces them, and what they read of torch."""

from __future__ import annotations

import ctypes
import struct
import unittest
from unittest import mock

import test_patching
import test_relocations
import torch
from fake_driver import CUresult, FakeApi
from fake_native import Launch, asking, library, native_over
from torch.testing._internal.common_utils import TestCase, run_tests

from pygraph_trees.cuda.driver import CONTEXT_GETTER, KERNEL_SETTER, Driver
from pygraph_trees.cuda.graph_nodes import NodeKind
from pygraph_trees.errors import DriverError
from pygraph_trees.native import binding, build
from pygraph_trees.trees.functions import native_names


class _Native:
    def make_driver(self, api: FakeApi) -> Driver:
        return Driver(api, native_over(api))


class TestKernels(_Native, test_relocations.TestKernels): ...


class TestHostArrays(_Native, test_relocations.TestHostArrays): ...


class TestOtherNodes(_Native, test_relocations.TestOtherNodes): ...


class TestFailures(_Native, test_relocations.TestFailures): ...


class TestAllAtOnce(_Native, test_relocations.TestAllAtOnce): ...


class TestPatching(test_patching.Patching, TestCase):
    native = True


class TestSetKernels(TestCase):
    """The call in C++, on a library that asks this test."""

    def setUp(self):
        super().setUp()
        native_over(FakeApi())  # skips the test if there is no native part
        from pygraph_trees.native import _graph_nodes

        self.library, self.found, self.refuses = str(library()), [], {}
        asking(cuGraphExecKernelNodeSetParams_v2=self.set_kernel)
        self.set_kernels = _graph_nodes.set_kernels
        self.structs = [Launch(shared=100 + n) for n in range(4)]
        pairs = [struct.pack("QQ", 0x9000 + n, ctypes.addressof(s)) for n, s in enumerate(self.structs)]
        self.packed = b"".join(pairs)

    def set_kernel(self, exec_, node, address):
        if code := self.refuses.get(len(self.found), 0):
            return code
        self.found.append((exec_, node, Launch.from_address(address).shared))
        return 0

    def test_each_in_order(self):
        self.assertIsNone(self.set_kernels(self.library, 0x77, self.packed))
        self.assertEqual(self.found, [(0x77, 0x9000 + n, 100 + n) for n in range(4)])
        self.structs[1].shared = 7
        self.assertIsNone(self.set_kernels(self.library, 0x88, self.packed[16:32]))
        self.assertEqual(self.found[4:], [(0x88, 0x9001, 7)])

    def test_a_refusal_ends_it(self):
        self.refuses[2] = 701
        self.assertEqual(self.set_kernels(self.library, 0x77, self.packed), (2, 701))
        self.assertEqual(len(self.found), 2)

    def test_a_driver_without_the_call(self):
        from pygraph_trees.native import _graph_nodes

        for native in ((), (_graph_nodes, "no such library"), (_graph_nodes, "libc.so.6")):
            driver = Driver(FakeApi(), *native)
            found = driver.set_kernels(0x77, ()), *map(driver.address_of, (KERNEL_SETTER, CONTEXT_GETTER))
            self.assertEqual(found, (None, None, None))
        self.assertRaises(RuntimeError, self.set_kernels, "", 0x77, self.packed)  # the process itself


class TestOverwriteStack(TestCase):
    def test_nothing_is_left_of_earlier_calls(self):
        driver = Driver(FakeApi())
        fake = ctypes.CDLL(str(library()))
        fake.fake_leave.argtypes = fake.fake_left.argtypes = [ctypes.c_size_t]
        fake.fake_left.restype = ctypes.c_size_t
        inverted = ~0x7F00_9000_0000 % (1 << 64)
        fake.fake_leave(inverted)
        self.assertGreater(fake.fake_left(inverted), 4000)
        fake.fake_leave(inverted)
        driver.overwrite_stack()
        self.assertEqual(fake.fake_left(inverted), 0)


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
        from pygraph_trees.native import _graph_nodes

        for name in ("no such library", "libc.so.6"):
            driver = Driver(self.api, _graph_nodes, name)
            with self.assertRaises(DriverError):
                driver.search(self.api.make_graph("EMPTY"), 0, 1)

    def test_without_it_nothing_is_searched(self):
        self.assertIsNone(Driver(self.api).search(self.api.make_graph("EMPTY"), 0, 1))


@unittest.skipIf(binding.extension is None, "not built for this torch")
class TestArguments(TestCase):
    def test_what_is_no_counter_is_refused(self):
        new, like = binding.extension.Counter, torch.empty(0)
        numbers = dict.fromkeys(("exec", "set", "get_context", "context", "count"), 0)
        lists = {name: [] for name in ("held", "own", "words", "nodes", "holders", "values")}
        for wrong in (None, 3, binding.Counter()):
            for counters in ((wrong, new()), (new(), wrong)):
                with self.assertRaises(TypeError):
                    given = dict(zip(("pool_changes", "sets"), counters, strict=True))
                    binding.extension.Addresses(owner=None, **given, **numbers, **lists)
                with self.assertRaises(TypeError):
                    given = dict(zip(("allocated", "given_away"), counters, strict=True))
                    binding.extension.OwnMemory(like=like, blocks=[], **given)


@unittest.skipIf(binding.extension is None, "not built for this torch")
class TestNames(TestCase):
    def test_the_installed_torch_has_every_name(self):
        self.assertGreater(len(binding.extension.NAMES), 5)
        self.assertEqual(native_names.missing(), [])
        extension = binding.extension
        with self.assertNoLogs("pygraph_trees.native"):
            native_names.check()
        self.assertIs(binding.extension, extension)

    def test_a_missing_name_turns_the_module_off_and_is_in_the_status(self):
        native = binding.extension
        for owner, name in (("manager", "turn"), ("graph", "replay"), ("debug", "RECORD")):
            with (
                mock.patch.object(native, "NAMES", [*native.NAMES, f"{owner}.{name}_by_another_name"]),
                mock.patch.object(binding, "extension", native),
                mock.patch.object(binding, "why_without", None),
            ):
                native_names.check()
                self.assertIsNone(binding.extension)
                self.assertIn(f"{owner}.{name}_by_another_name", build.status())

    def test_renamed_state_of_upstream_turns_the_module_off(self):
        """Otherwise upstream would set attributes that no replay reads."""
        with (
            mock.patch.object(native_names, "_STATE", (*native_names._STATE, "by_another_name")),
            mock.patch.object(binding, "extension", binding.extension),
            mock.patch.object(binding, "why_without", None),
        ):
            native_names.check()
            self.assertIn("manager.by_another_name", build.status())


if __name__ == "__main__":
    run_tests()
