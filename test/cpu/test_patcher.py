"""Kernels are given new addresses in C++: the tests of live inputs hold with it, and Python is asked when necessary."""

import gc
import struct
import unittest
import weakref
from unittest import mock

import test_live_inputs
from hypothesis import given
from hypothesis import strategies as st
from test_live_inputs import KERNEL, LiveInputsTestCase, at
from torch.testing._internal.common_utils import run_tests

from pygraph_trees.cuda.driver import Driver
from pygraph_trees.native import binding

requires_cpp = unittest.skipIf(binding.extension is None, "the part in C++ was not built")


for name in ("TestAddresses", "TestCopies", "TestOutputs", "TestFailures"):
    in_cpp = {"native": True, "__module__": __name__}
    globals()[name] = requires_cpp(type(name, (getattr(test_live_inputs, name),), in_cpp))


def addresses(inputs):
    return [t.data_ptr() for t in inputs]


def patch(live, inputs):
    """Gives the graph the inputs' addresses; returns whether C++ did so alone."""
    return live.addresses.native.patch(addresses(inputs))


@requires_cpp
class PatcherTestCase(LiveInputsTestCase):
    native = True

    def recorded(self, nodes=None, kernels=1, inputs=2, count=2):
        """Returns live inputs, a graph whose kernels each hold all of them, and sets of inputs that fitted."""
        nodes = nodes or (lambda found: [self.api.make_kernel([*found, n]) for n in range(kernels)])
        sets = [[at(0) for _ in range(inputs)] for _ in range(count)]
        live, graph = self.replayable(nodes, *sets[0])
        for given_ in (*sets, sets[0]):
            self.call(live, graph, *given_)
        self.api.calls.clear()
        return live, graph, sets


class TestPatcher(PatcherTestCase):
    def replay(self, live, *inputs):
        """Gives the graph the inputs' addresses as a fast replay does; returns whether C++ did so alone."""
        is_patched = patch(live, inputs)
        if not is_patched:
            self.assertIsNotNone(live.addresses.prepare_fast(inputs, addresses(inputs)))
        return is_patched

    def holds(self, graph, inputs):
        return [launched[: len(inputs)] == addresses(inputs) for launched in graph.launch()]

    def test_addresses_that_fitted_are_set_without_python(self):
        live, graph, sets = self.recorded(kernels=3)
        set_calls = live.addresses.sets.value
        for inputs in (sets[1], sets[0], [sets[0][0], sets[1][1]], [sets[0][0], sets[1][1]]):
            self.assertTrue(self.replay(live, *inputs))
            self.assertEqual(self.holds(graph, inputs), [True] * 3)
            self.assertTrue(all(map(live.addresses.reaches, addresses(inputs))))
        self.assertEqual(live.addresses.sets.value - set_calls, 9)
        self.assertEqual(self.api.calls, [KERNEL] * 9)  # the last call changes nothing
        self.assertFalse(live.addresses.reaches(sets[1][0].data_ptr()))

    def test_python_goes_on_from_what_the_fast_path_set(self):
        live, graph, sets = self.recorded(kernels=2)
        self.assertTrue(self.replay(live, *sets[1]))
        self.assertEqual(self.call(live, graph, *sets[1])[0][:2], addresses(sets[1]))
        self.assertEqual(self.api.calls, [KERNEL] * 2)  # the call in Python found all addresses in place
        for inputs in (sets[0], sets[1]):
            self.assertEqual(self.call(live, graph, *inputs)[1][:2], addresses(inputs))
        self.assertEqual(self.api.calls, [KERNEL] * 6)
        self.assertTrue(self.replay(live, *sets[0]))
        self.assertEqual(self.holds(graph, sets[0]), [True] * 2)

    def test_nodes_are_set_in_their_own_context(self):
        """Another device's context may be current. It is current again afterwards, even if the call fails."""
        live, graph, sets = self.recorded()
        other = self.api.context_of_another_device
        for inputs in (sets[1], sets[0]):
            self.driver.enter(other)
            self.api.calls.clear()
            self.assertFalse(self.replay(live, *inputs))
            self.assertEqual(self.api.calls, ["cuCtxSetCurrent", KERNEL, "cuCtxSetCurrent"])
            self.assertEqual(int(self.driver.context()), int(other))
            self.assertEqual(self.holds(graph, inputs), [True])
        self.api.fail("cuGraphExecKernelNodeSetParams")
        self.assertIsNotNone(live.addresses.prepare(sets[1]))
        self.assertEqual(int(self.driver.context()), int(other))

    def test_only_nodes_that_hold_what_changed_are_set(self):
        make = self.api.make_kernel
        live, graph, sets = self.recorded(lambda found: [make([found[0]]), make([found[1], 8, found[1] + 16])])
        self.assertTrue(self.replay(live, sets[1][0], sets[0][1]))
        self.assertEqual(self.api.calls, [KERNEL])
        second = sets[0][1].data_ptr()
        self.assertEqual(graph.launch(), [[sets[1][0].data_ptr()], [second, 8, second + 16]])
        self.assertTrue(self.replay(live, *sets[1]))
        self.assertEqual(self.api.calls, [KERNEL] * 2)

    @given(st.booleans(), st.booleans())
    def test_addresses_among_other_parameters(self, packed, apart):
        """Parameters may be in one piece, or an address inside a larger parameter."""
        self.restart()

        def nodes(found):
            inside = struct.pack("<QQQ", 7, found[0] + 16, 9)
            more = {} if packed else {"apart": apart}
            return [self.api.make_kernel([inside, found[1]], packed=packed, **more), self.api.make_kernel([found[1]])]

        live, graph, sets = self.recorded(nodes)
        for inputs in (sets[1], sets[0], [sets[0][0], sets[1][1]]):
            self.assertTrue(patch(live, inputs))
            first, second = addresses(inputs)
            self.assertEqual(graph.launch(), [[7, first + 16, 9, second], [second]])

    def test_what_python_is_asked_about(self):
        """Addresses that have not fitted before, any that come after copies, and all after a change of the pool."""
        live, graph, sets = self.recorded()
        new = [sets[0][0], at(0)]
        self.assertFalse(patch(live, new))
        self.assertEqual(self.call(live, graph, *new)[0][:2], addresses(new))
        self.call(live, graph, *sets[0])
        self.assertTrue(patch(live, new))
        self.call(live, graph, at(4), sets[0][1])  # less aligned
        self.assertEqual(live.addresses.extra_copies, 1)
        self.assertFalse(patch(live, sets[1]))
        self.call(live, graph, *sets[1])
        self.assertTrue(patch(live, sets[0]))
        self.assertEqual(self.holds(graph, sets[0]), [True])
        self.pool.forget()
        self.assertFalse(patch(live, sets[1]))
        self.put_in_pool(sets[1][0])
        self.assertIsNone(live.addresses.prepare(sets[1]))
        self.assertEqual(list(live.addresses.temporary), [0])

    @given(st.integers(1, 5), st.integers(0, 5))
    def test_what_is_refused_once_is_set_by_python(self, kernels, after):
        self.restart()
        live, graph, sets = self.recorded(kernels=kernels)
        self.api.fail(KERNEL, after)
        is_set = patch(live, sets[1])
        self.assertEqual(is_set, after >= kernels)
        self.assertFalse(live.addresses._patches.broken)
        if not is_set:
            self.assertEqual(self.holds(graph, sets[0]), [True] * kernels)  # the change was taken back
            self.assertIsNone(live.addresses.native.seen)
            self.assertFalse(self.replay(live, *sets[1]))
        self.assertEqual(self.holds(graph, sets[1]), [True] * kernels)

    def test_what_cannot_be_taken_back_is_never_launched_again(self):
        """Whether C++ has broken the graph, or Python."""
        for give, refused in ((patch, [0, 1]), (lambda live, inputs: not live.addresses.prepare(inputs), [0])):
            live, _, sets = self.recorded(kernels=3)
            for after in (2, 3):  # the third node, and the first node a second time
                self.api.fail(KERNEL, after)
            self.assertFalse(give(live, sets[1]))
            self.assertTrue(live.addresses._patches.broken)
            for inputs in sets:
                self.assertFalse(patch(live, inputs))
                self.assertEqual(live.addresses.prepare(inputs), "a driver call failed")
            self.assertEqual(list(live.addresses.refused), refused)  # they will be copied

    def test_what_cpp_does_not_set(self):
        """C++ sets no nodes other than kernels, and no nodes at all if the driver's calls have no addresses."""
        recordings = [self.recorded(lambda found: [self.api.make_memset(found[0], 16)], inputs=1)]
        self.driver = Driver(self.api)
        recordings.append(self.recorded(self.one_kernel(), inputs=1))
        with mock.patch.object(binding, "extension", None):
            recordings.append(self.recorded(self.one_kernel(), inputs=1))
        for number, (live, graph, sets) in enumerate(recordings):
            self.assertEqual(live.addresses.native is None, number != 1)
            for inputs in (sets[1], sets[0]):
                self.call(live, graph, *inputs)
                self.assertFalse(number == 1 and patch(live, sets[0]))

    def test_its_memory_lives_as_long_as_it_does(self):
        live, graph, sets = self.recorded()
        native, reference = live.addresses.native, weakref.ref(live.addresses._patches)
        del live
        gc.collect()
        self.assertIsNone(reference())
        self.assertTrue(native.patch(addresses(sets[1])))
        self.assertEqual(self.holds(graph, sets[1]), [True])


if __name__ == "__main__":
    run_tests()
