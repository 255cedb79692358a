"""The parts in C++: whether they are used, what replaces them, and what they read of torch."""

import ctypes
import unittest
from types import SimpleNamespace
from unittest import mock

import torch
from fake_driver import FakeApi
from fake_native import library
from torch.testing._internal.common_utils import TestCase, run_tests

from pygraph_trees.cuda.driver import KERNEL_SETTER, Driver
from pygraph_trees.native import binding, build
from pygraph_trees.trees.functions import native_names


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


class TestAddressOf(TestCase):
    def test_a_library_without_the_call(self):
        for name in (None, "no such library", "libc.so.6"):
            self.assertIsNone(Driver(FakeApi(), name).address_of(KERNEL_SETTER))
        self.assertGreater(Driver(FakeApi(), "libc.so.6").address_of("getpid"), 0)


@unittest.skipIf(binding.extension is None, "not built for this torch")
class TestArguments(TestCase):
    def test_what_is_no_counter_is_refused(self):
        new, like = binding.extension.Counter, torch.empty(0)
        numbers = dict.fromkeys(("exec", "set", "get_context", "context", "count"), 0)
        lists = {name: [] for name in ("held", "own", "words", "nodes", "holders", "values")}
        for wrong in (None, 3, SimpleNamespace(value=0)):
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
        """If state of upstream has another name, upstream would set attributes that no replay reads."""
        native = binding.extension
        for owner, names, name, told in (
            *((native, "NAMES", name, name) for name in ("manager.turned", "graph.replayed", "debug.RECORDED")),
            (native_names, "_STATE", "renamed", "manager.renamed"),
        ):
            renamed = mock.patch.object(owner, names, [*getattr(owner, names), name])
            with renamed, mock.patch.multiple(binding, extension=native, why_without=None):
                native_names.check()
                self.assertIsNone(binding.extension)
                self.assertIn(told, build.status())


if __name__ == "__main__":
    run_tests()
