"""New addresses for kernels in C++: what holds of live inputs in Python holds with it, and who is asked when.

The driver's function is one of the fake driver's, called through its address.
"""

from __future__ import annotations

import ctypes
import gc
import sys
import threading
import unittest
import weakref
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import fake_native
import test_live_inputs
import torch
from fake_driver import CUresult
from hypothesis import given, settings
from hypothesis import strategies as st
from test_fast_path import Trees as FakeTrees
from test_live_inputs import KERNEL, LiveInputsTestCase, at
from torch.testing._internal.common_utils import TestCase, run_tests

from pygraph_trees.cuda.driver import Driver
from pygraph_trees.indirection import inputs as live_inputs
from pygraph_trees.indirection.patching import Patches
from pygraph_trees.native import tensors

requires_cpp = unittest.skipIf(tensors.extension is None, "the part in C++ was not built")


@requires_cpp
class TestAddresses(test_live_inputs.TestAddresses):
    native = True


@requires_cpp
class TestCopies(test_live_inputs.TestCopies):
    native = True

    @settings(max_examples=60, deadline=None)
    @given(test_live_inputs.CALLS, st.booleans())
    def test_any_sequence_of_calls(self, calls, with_copy):
        self.check_any_sequence_of_calls(calls, with_copy)


@requires_cpp
class TestOutputs(test_live_inputs.TestOutputs):
    native = True


@requires_cpp
class TestFailures(test_live_inputs.TestFailures):
    native = True

    @unittest.skip("C does not ask the bindings")
    def test_a_call_that_the_bindings_lack_makes_all_copied(self): ...


@requires_cpp
class TestPatcher(LiveInputsTestCase):
    native = True

    def recorded(self, kernels=1, inputs=2):
        """Live inputs of kernels that each hold all of them, and two sets of inputs that fitted."""
        sets = [[at(0) for _ in range(inputs)] for _ in range(2)]
        live, graph = self.record(lambda found: [self.api.make_kernel([*found, n]) for n in range(kernels)], *sets[0])
        live.finish()
        for given_ in (*sets, sets[0]):
            self.call(live, graph, *given_)
        self.api.calls.clear()
        return live, graph, sets

    def holds(self, graph, inputs):
        return [launched[: len(inputs)] == [t.data_ptr() for t in inputs] for launched in graph.launch()]

    def test_addresses_that_fitted_are_set_without_python(self):
        live, graph, sets = self.recorded(kernels=3)
        set_calls = live._patches.set_calls
        with (
            mock.patch.object(Patches, "apply", side_effect=AssertionError("C++ does it")),
            mock.patch.object(live, "_find_addresses", side_effect=AssertionError("they are known")),
        ):
            for inputs in (sets[1], sets[0], [sets[0][0], sets[1][1]], [sets[0][0], sets[1][1]]):
                self.assertEqual(self.call(live, graph, *inputs)[0][:2], [t.data_ptr() for t in inputs])
        self.assertEqual(live._patches.set_calls - set_calls, 9)
        self.assertEqual(self.api.calls, [KERNEL] * 9)  # the last call changes nothing
        self.assertIs(live._seen, live._settled)
        self.assertEqual(live._addresses, live._patches.addresses)

    def test_a_thread_that_has_not_used_the_gpu(self):
        """It has no context, and the driver crashes without one where nodes are set."""
        live, graph, sets = self.recorded()
        made = []

        def call():
            for inputs in (sets[1], sets[0]):
                self.call(live, graph, *inputs)
                made.append(self.holds(graph, inputs))

        apply = mock.Mock(wraps=live._patches.apply)
        with mock.patch.object(Patches, "apply", apply):
            thread = threading.Thread(target=call)
            thread.start()
            thread.join()
        self.assertEqual(made, [[True], [True]])
        self.assertEqual(apply.call_count, 1)  # Python sees to it, once
        self.assertEqual(self.api.calls, ["cuCtxSetCurrent", KERNEL, KERNEL])

    def test_nodes_are_set_in_their_own_context(self):
        """While another device's is current, which it is afterwards, whatever becomes of the call."""
        live, graph, sets = self.recorded()
        other = self.api.context_of_another_device
        for inputs in (sets[1], sets[0]):
            self.driver.enter(other)
            self.api.calls.clear()
            self.call(live, graph, *inputs)
            self.assertEqual(self.api.calls, ["cuCtxSetCurrent", KERNEL, "cuCtxSetCurrent"])
            self.assertEqual(int(self.driver.context()), int(other))
            self.assertEqual(self.holds(graph, inputs), [True])
        self.api.fail("cuGraphExecKernelNodeSetParams")
        self.assertIsNotNone(live.prepare(sets[1]))
        self.assertEqual(int(self.driver.context()), int(other))

    def test_it_is_broken_while_nodes_are_set(self):
        live, _, sets = self.recorded(kernels=2)
        states, original = [], self.api.cuGraphExecKernelNodeSetParams

        def note(*args):
            states.append((live._patches.broken, live._settled))
            return original(*args)

        with mock.patch.object(self.api, "cuGraphExecKernelNodeSetParams", note):
            self.assertTrue(live._patcher(live, [t.data_ptr() for t in sets[1]]))
        self.assertEqual(states, [(True, None)] * 2)
        self.assertFalse(live._patches.broken)

    def test_a_call_by_a_finalizer(self):
        """That the collector runs while lists are made: the graph holds what it is believed to hold."""
        called = 0

        class Garbage:
            def __init__(self, live, addresses, calls):
                self.live, self.addresses, self.calls, self.itself = live, addresses, calls, self

            def __del__(self):
                if not self.live._patches.broken:  # as it is in the fake driver's call, which makes lists too
                    self.calls.append(self.live._patcher(self.live, self.addresses))

        self.addCleanup(gc.set_threshold, *gc.get_threshold())
        self.addCleanup(gc.enable)
        for ahead in range(-2, 8):
            gc.collect()
            gc.disable()
            self.restart()
            live, graph, sets = self.recorded(kernels=2)
            first, second = ([t.data_ptr() for t in inputs] for inputs in sets)
            held, calls = [], []
            Garbage(live, [first[0], second[1]], calls)
            patcher, given_ = live._patcher, list(second)
            for _ in range(500):
                held.append([])  # so that none is kept in reserve
            gc.set_threshold(gc.get_count()[0] + ahead, 10**6, 10**6)
            gc.enable()
            answer = patcher(live, given_)
            gc.disable()
            called += len(calls)
            self.assertTrue(answer)
            self.assertEqual(live._settled, given_)
            self.assertEqual(self.holds(graph, sets[1]), [True, True], f"{ahead} allocations ahead")
        if sys.version_info < (3, 12):  # where it is run only between instructions of Python
            self.assertGreater(called, 0)

    def test_not_while_there_are_copies(self):
        live, _, sets = self.recorded()
        live.temporary = {0: sets[0][0]}
        self.assertFalse(live._patcher(live, [t.data_ptr() for t in sets[1]]))

    def test_only_nodes_that_hold_what_changed_are_set(self):
        sets = [[at(0), at(0)] for _ in range(2)]
        live, graph = self.record(
            lambda found: [self.api.make_kernel([found[0]]), self.api.make_kernel([found[1], 8, found[1] + 16])],
            *sets[0],
        )
        live.finish()
        for inputs in (*sets, sets[0]):
            self.call(live, graph, *inputs)
        self.api.calls.clear()
        self.call(live, graph, sets[1][0], sets[0][1])
        self.assertEqual(self.api.calls, [KERNEL])
        second = sets[0][1].data_ptr()
        self.assertEqual(graph.launch(), [[sets[1][0].data_ptr()], [second, 8, second + 16]])
        self.call(live, graph, *sets[1])
        self.assertEqual(self.api.calls, [KERNEL] * 2)

    @given(st.booleans(), st.booleans())
    def test_addresses_among_other_parameters(self, packed, apart):
        """In one piece, or inside of one: not each is a parameter by itself."""
        self.restart()
        sets = [[at(0), at(0)] for _ in range(2)]

        def nodes(found):
            inside = b"".join(word.to_bytes(8, "little") for word in (7, found[0] + 16, 9))
            more = {} if packed else {"apart": apart}
            return [self.api.make_kernel([inside, found[1]], packed=packed, **more), self.api.make_kernel([found[1]])]

        live, graph = self.record(nodes, *sets[0])
        live.finish()
        for inputs in (*sets, sets[0]):
            self.call(live, graph, *inputs)
        for inputs in (sets[1], sets[0], [sets[0][0], sets[1][1]]):
            first, second = (t.data_ptr() for t in inputs)
            self.assertTrue(live._patcher(live, [first, second]))
            self.assertEqual(graph.launch(), [[7, first + 16, 9, second], [second]])

    def test_python_is_asked_about_the_others(self):
        live, graph, sets = self.recorded()
        new = [sets[0][0], at(0)]
        self.assertFalse(live._patcher(live, [t.data_ptr() for t in new]))
        self.assertEqual(self.call(live, graph, *new)[0][:2], [t.data_ptr() for t in new])
        self.call(live, graph, *sets[0])
        self.assertTrue(live._patcher(live, [t.data_ptr() for t in new]))

    def test_a_pool_that_changed_is_looked_at_by_python(self):
        live, _, sets = self.recorded()
        self.pool.forget()
        self.assertFalse(live._patcher(live, [t.data_ptr() for t in sets[1]]))
        self.put_in_pool(sets[1][0])
        self.assertIsNone(live.prepare(sets[1]))
        self.assertEqual(list(live.temporary), [0])

    def test_behind_a_call_with_copies_python_is_asked(self):
        live, graph, sets = self.recorded()
        self.call(live, graph, at(4), sets[0][1])  # less aligned
        self.assertEqual(live.extra_copies, 1)
        self.assertFalse(live._patcher(live, [t.data_ptr() for t in sets[1]]))
        self.call(live, graph, *sets[1])
        self.assertTrue(live._patcher(live, [t.data_ptr() for t in sets[0]]))
        self.assertEqual(self.holds(graph, sets[0]), [True])

    @given(st.integers(1, 5), st.integers(0, 5))
    def test_what_is_refused_once_is_set_by_python(self, kernels, after):
        self.restart()
        live, graph, sets = self.recorded(kernels)
        self.api.fail(KERNEL, after)
        is_set = live._patcher(live, [t.data_ptr() for t in sets[1]])
        self.assertEqual(is_set, after >= kernels)
        self.assertFalse(live._patches.broken)
        if not is_set:
            self.assertEqual(self.holds(graph, sets[0]), [True] * kernels)  # it was taken back
            self.assertEqual((live._settled, live._seen), (None, []))
            self.assertIsNone(live.prepare(sets[1]))
        self.assertEqual(self.holds(graph, sets[1]), [True] * kernels)

    def test_what_is_always_refused_is_said_by_python(self):
        live, _, sets = self.recorded(kernels=4)
        refused = live._patches._kernels[2].handle
        original = self.api.cuGraphExecKernelNodeSetParams

        def refuse(exec_, node, params):
            return (CUresult.CUDA_ERROR_INVALID_VALUE,) if int(node) == refused else original(exec_, node, params)

        with mock.patch.object(self.api, "cuGraphExecKernelNodeSetParams", refuse):
            self.assertRegex(str(live.prepare(sets[1])), "refused an address of input 0")
        self.assertEqual(list(live.refused), [0])
        self.assertTrue(live._patches.broken)

    def test_what_cannot_be_taken_back_is_not_launched(self):
        live, _, sets = self.recorded(kernels=3)
        for after in (2, 3):  # the third node, and the first one once more
            self.api.fail(KERNEL, after)
        self.assertFalse(live._patcher(live, [t.data_ptr() for t in sets[1]]))
        self.assertTrue(live._patches.broken)
        for inputs in sets:
            self.assertEqual(live.prepare(inputs), "a driver call failed")
        self.assertEqual(list(live.refused), [0, 1])  # they will be copied

    def test_a_graph_that_is_broken_stays_so(self):
        live, graph, sets = self.recorded()
        live._patches.broken = True
        self.assertFalse(live._patcher(live, [t.data_ptr() for t in sets[1]]))
        self.assertEqual(live.prepare(sets[1]), "a driver call failed")
        self.assertEqual(self.holds(graph, sets[0]), [True])

    def test_who_has_none(self):
        copy = at(0)
        live, _ = self.record(lambda found: [self.api.make_memset(found[0], 16)], copy)
        self.assertIsNone(live._patcher)
        with mock.patch.object(tensors, "extension", None):
            live, _ = self.record(self.one_kernel(), copy)
        self.assertIsNone(live._patcher)
        self.driver = Driver(self.api)
        live, _ = self.record(self.one_kernel(), copy)
        self.assertIsNone(live._patcher)

    def test_it_goes_with_the_live_inputs(self):
        live, graph, _ = self.recorded()
        patches, patcher = weakref.ref(live._patches), live._patcher
        del live, graph
        gc.collect()
        self.assertIsNotNone(patches())  # C++ writes to its table
        del patcher
        gc.collect()
        self.assertIsNone(patches())


@requires_cpp
class TestFastPath(LiveInputsTestCase):
    """From the call of a compiled graph: the entry, the recording's part, the live inputs, the driver's call."""

    native = True

    @settings(deadline=None)
    @given(st.sampled_from([None, [2, 0, 1], [1, 2, 0]]), st.lists(st.lists(st.integers(0, 2), min_size=3, max_size=3)))
    def test_each_launch_has_its_addresses(self, order, calls):
        self.restart()
        sets = [[at(0) for _ in range(3)] for _ in range(3)]
        live, graph = self.record(
            lambda found: [self.api.make_kernel([found[2], 5, found[0]]), self.api.make_kernel([found[1]])], *sets[0]
        )
        live.finish()
        for inputs in (*sets, sets[0]):
            self.call(live, graph, *inputs)
        trees = FakeTrees({}, [torch.zeros(1)], live=live)
        entry = trees.entry(order=order)
        with (
            mock.patch.object(Patches, "apply", side_effect=AssertionError("C++ does it")),
            mock.patch.object(live_inputs.LiveInputs, "prepare", side_effect=AssertionError("it asks nobody")),
        ):
            for places in calls:
                inputs = [sets[which][index] for index, which in enumerate(places)]
                given_ = list(inputs)
                for index, place in enumerate(order or range(3)):
                    given_[place] = inputs[index]
                outputs = entry(given_)
                self.assertEqual(len(outputs), 1)
                first, second, third = (t.data_ptr() for t in inputs)
                self.assertEqual(graph.launch(), [[third, 5, first], [second]])
        self.assertEqual((trees.graph.launches, trees.handed), (len(calls), []))


@requires_cpp
class TestBadArguments(TestCase):
    def make(self, **more):
        path = fake_native.library()
        if path is None:
            self.skipTest("there is no C compiler")
        get_context = ctypes.CDLL(str(path)).cuCtxGetCurrent
        current = ctypes.c_void_p()
        get_context(ctypes.byref(current))
        arguments = dict(patches=None, words=b"", nodes=b"", holders=b"", inputs=1, exec=1, set=1, ask_every=0)
        arguments |= {"get_context": ctypes.cast(get_context, ctypes.c_void_p).value, "context": current.value or 1}
        return tensors.extension.Patcher(**(arguments | more))

    def test_numbers_that_do_not_exist(self):
        self.make()
        packed = tensors.packed
        for wrong in (
            {"words": packed([8, 1, 0])},
            {"words": packed([0, 0, 0])},
            {"holders": packed([0, 0])},
            {"holders": packed([1, 0]), "nodes": packed([1, 1])},
            {"exec": 0},
            {"set": 0},
            {"context": 0},
            {"get_context": 0},
        ):
            with self.subTest(wrong), self.assertRaises(ValueError):
                self.make(**wrong)

    def test_types(self):
        for wrong in ({"words": b"123"}, {"nodes": None}, {"exec": "8"}):
            with self.subTest(wrong), self.assertRaises(TypeError):
                self.make(**wrong)
        for arguments in ((), (1,), (1, 2), (1, (2,))):
            with self.subTest(arguments), self.assertRaises(TypeError):
                self.make()(*arguments)

    def test_something_else_than_live_inputs(self):
        class Slotted:
            __slots__ = ("broken",)

        with self.assertRaises(AttributeError):
            self.make(patches=Slotted())(object(), [1])
        with self.assertRaises(TypeError):
            self.make()(object(), [1], more=1)
        with self.assertRaises(AttributeError):
            self.make()(object(), [1])
        self.assertFalse(self.make()(object(), []))


if __name__ == "__main__":
    run_tests()
