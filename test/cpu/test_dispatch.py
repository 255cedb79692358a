"""Which way the calls of a function go, which managers may replay it, and what they learn of its un-graphed calls."""

import gc
import threading
import unittest
import weakref
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from unittest import mock

import torch
from fake_trees import Plain, bare_manager, manager_of, replaying
from recordings_on_cpu import SIZE, Function, OnCpuTestCase
from torch._inductor import cudagraph_trees, output_code
from torch._inductor.cudagraph_trees import FunctionID
from torch._inductor.cudagraph_utils import BoxedDeviceIndex
from torch.testing._internal.common_utils import TestCase, run_tests

from pygraph_trees.native import binding
from pygraph_trees.trees.functions import home
from pygraph_trees.trees.functions.dispatch import Dispatch
from pygraph_trees.trees.functions.fast_path import entry
from pygraph_trees.trees.hooks import choice
from pygraph_trees.trees.managers import calls
from pygraph_trees.trees.managers.calls import Upstream
from pygraph_trees.trees.managers.manager import Manager

IDS = {number: FunctionID(number) for number in range(7, 12)}


def replayed():
    """A dispatch and the manager that may replay its function."""
    dispatch, manager = Dispatch(), Plain()
    dispatch.add()
    dispatch.may_be_replayed_by(manager, 7)
    return dispatch, manager


def replaying_ids(*values):
    """A manager that replays calls whose first input is "x", and returns the id of the function and ``values``."""
    return replaying(lambda inputs, function_id: [function_id, *values] if inputs[0] == "x" else None)


@unittest.skipIf(binding.extension is None, "not built for this torch")
class TestManagers(TestCase):
    def test_a_function_is_replayed_if_it_was_added(self):
        for added, is_replayed in (
            ([None], True),
            ([{1: 3}], False),  # each set of values is its own function
            ([None, None], True),
            ([], False),
        ):
            with self.subTest(added=added):
                dispatch, manager = Dispatch(), Plain()
                for integers in added:
                    dispatch.add(manager, 7, integers)
                    self.assertIsNone(manager_of(dispatch))
                self.assertEqual(dispatch.is_added, bool(added))
                dispatch.may_be_replayed_by(manager, 7)
                self.assertEqual(manager_of(dispatch) is manager, is_replayed)
                del manager
                self.assertIsNone(manager_of(dispatch))

    def test_each_set_of_integers_is_replayed_by_itself(self):
        manager, dispatch = replaying_ids(), Dispatch()
        fast_call = entry(dispatch)
        for number, values in ((7, (3, 4)), (8, (3, 5))):
            dispatch.add(manager, IDS[number], {1: values[0], 3: values[1]})
        first, second, unknown = ("x", 3, "y", 4), ("x", 3, "y", 5), ("x", 4, "y", 4)
        self.assertIsNone(fast_call([*first]))
        dispatch.may_be_replayed_by(manager, IDS[7])
        self.assertEqual([fast_call([*i]) for i in (first, second, unknown)], [[IDS[7]], None, None])
        dispatch.may_be_replayed_by(manager, IDS[8])
        dispatch.may_be_replayed_by(manager, IDS[9])  # the id of another function
        self.assertEqual([fast_call([*first]), fast_call([*second])], [[IDS[7]], [IDS[8]]])
        self.assertIsNone(fast_call(["z", 3, "y", 4]))

        dispatch.go(len, is_graphed=False)
        self.assertIsNone(fast_call([*first]))
        dispatch.go()
        self.assertEqual(fast_call([*first]), [IDS[7]])
        dispatch.add(manager, IDS[10], {1: 3, 3: 4})  # again
        self.assertEqual([fast_call([*first]), fast_call([*second])], [None, [IDS[8]]])
        dispatch.may_be_replayed_by(manager, IDS[10])
        self.assertEqual(fast_call([*first]), [IDS[10]])
        del manager
        self.assertIsNone(fast_call([*second]))

    def test_a_dispatch_is_freed_at_once(self):
        dispatch, manager = replayed()
        gone = weakref.ref(dispatch)
        gc.disable()
        self.addCleanup(gc.enable)
        del dispatch
        self.assertIsNone(gone())
        del manager

    def test_only_replayed_calls_are_given_a_manager(self):
        dispatch, manager = replayed()
        for call in (None, len):
            dispatch.go(call)
            self.assertIs(manager_of(dispatch), manager if call is None else None)
            seen = []
            self.assertEqual(dispatch.replay(lambda _: seen.append(manager_of(dispatch)) or "outputs", []), "outputs")  # noqa: B023
            self.assertEqual(seen, [manager])
            self.assertIs(manager_of(dispatch), manager if call is None else None)
        dispatch.go(len)
        self.assertRaises(ZeroDivisionError, dispatch.replay, lambda _: 1 / 0, [])
        self.assertIsNone(manager_of(dispatch))


@unittest.skipIf(binding.extension is None, "not built for this torch")
class TestThreads(TestCase):
    def setUp(self):
        super().setUp()
        self.dispatch = Dispatch()
        self.fast_call = entry(self.dispatch)
        self.first, self.second = (self.enterContext(ThreadPoolExecutor(1)) for _ in range(2))

    def add(self, number, *values):
        """Adds the function to a manager of this thread, which is returned with a reference to its own memory."""
        manager, own = replaying_ids(number), Plain()
        self.dispatch.add(manager, IDS[number], dict(enumerate(values, 1)))
        self.dispatch.may_be_replayed_by(manager, IDS[number], None if values else own)
        return manager, weakref.ref(own)

    def in_both(self, call):
        """The results of calls in both threads, which take turns."""
        return [thread.submit(call).result(60) for _ in range(3) for thread in (self.first, self.second)]

    def test_each_thread_is_replayed_by_its_own_manager(self):
        held = [pool.submit(self.add, number).result(60) for pool, number in ((self.first, 7), (self.second, 8))]
        self.assertEqual(self.in_both(lambda: self.fast_call(["x"])), [[IDS[7], 7], [IDS[8], 8]] * 3)
        self.assertIsNone(self.fast_call(["x"]))  # from a third thread
        self.second.submit(self.dispatch.add).result(60)  # again: its manager has another id
        self.assertEqual(self.in_both(lambda: self.fast_call(["x"])), [[IDS[7], 7], None] * 3)
        held.append(self.second.submit(self.add, 9).result(60))
        self.assertEqual(self.in_both(lambda: self.fast_call(["x"])), [[IDS[7], 7], [IDS[9], 9]] * 3)

    def test_functions_of_integers(self):
        held = [self.first.submit(self.add, 7, 3).result(60), self.second.submit(self.add, 8, 3).result(60)]
        held.append(self.second.submit(self.add, 9, 4).result(60))
        for value, second in ((3, [IDS[8], 8]), (4, [IDS[9], 9])):
            first = [IDS[7], 7] if value == 3 else None
            self.assertEqual(self.in_both(lambda: self.fast_call(["x", value])), [first, second] * 3)  # noqa: B023

    def test_nothing_is_left_of_a_manager_that_is_gone(self):
        """In particular no own memory. Functions of other threads are still replayed, whichever was replayed last."""
        for last in (self.first, self.second):
            first, memory = self.first.submit(self.add, 7).result(60)
            second, other = self.second.submit(self.add, 8).result(60)
            last.submit(self.fast_call, ["x"]).result(60)
            gone = weakref.ref(first)
            del first
            gc.collect()
            self.assertEqual((gone(), memory()), (None, None))
            self.assertIsNotNone(other())
            self.assertEqual(len(self.dispatch.replayers), 1)
            self.assertEqual(self.in_both(lambda: self.fast_call(["x"])), [None, [IDS[8], 8]] * 3)
            del second
            gc.collect()
            self.assertEqual((self.dispatch.replayers, self.dispatch.replayer, other()), ({}, None, None))

    def test_many_threads_at_once(self):
        start, wrong, managers = threading.Barrier(8), [], []

        def work(number):
            manager, _ = self.add(number)
            managers.append(manager)
            start.wait(60)
            wrong.extend(found for _ in range(500) if (found := self.fast_call(["x"])) != [IDS[number], number])

        IDS.update({number: FunctionID(number) for number in range(20, 28)})
        with ThreadPoolExecutor(8) as threads:
            list(threads.map(work, range(20, 28)))
        self.assertEqual((wrong, len(self.dispatch.replayers)), ([], 8))


class TestFlags(TestCase):
    def setUp(self):
        super().setUp()
        made = lambda device, **options: bare_manager(Upstream)  # noqa: E731  options since torch 2.15
        self.enterContext(mock.patch.object(cudagraph_trees, "CUDAGraphTreeManager", made))
        containers = cudagraph_trees.get_obj(cudagraph_trees.local, "tree_manager_containers")
        self.enterContext(mock.patch.dict(containers, clear=True))

    def test_upstreams_manager_awaits_the_backward_of_an_ungraphed_forward(self):
        """A step of one thread does not change which backwards another thread waits for."""
        modes = "forward", "backward"
        forward, backward = (choice.as_upstream_has_it(lambda inputs: inputs, mode, 0) for mode in modes)

        def forward_and_manager():
            forward([])
            return cudagraph_trees.get_manager(0, create_if_none_exists=False)

        mine = forward_and_manager()
        with ThreadPoolExecutor(1) as other:
            other.submit(backward, []).result()
            self.assertTrue(mine.running_forwards_with_pending_backwards)
            backward([])
            self.assertFalse(mine.running_forwards_with_pending_backwards)
            its = other.submit(forward_and_manager).result()
        self.assertIsNot(its, mine)
        self.assertTrue(its.running_forwards_with_pending_backwards)
        self.assertFalse(mine.running_forwards_with_pending_backwards)

    def test_a_backward_that_is_not_graphed_finds_the_manager_of_its_forward(self):
        """Upstream asserts that there is one, and tells it forever. It may be gone, or never have been made."""
        graphs = []
        for _ in range(2):  # before and after a manager is made
            for is_backward in (True, False):
                graph = SimpleNamespace(fx_kwargs={"is_backward": is_backward}, current_callable=lambda _: "gradients")
                output_code.maybe_handle_backward_generation(graph, BoxedDeviceIndex(0))
                graphs.append(graph)
            self.assertEqual([graph.current_callable([]) for graph in graphs], ["gradients"] * len(graphs))
            first = cudagraph_trees.get_manager(0)
        gone = weakref.ref(first)
        cudagraph_trees.get_container(0).tree_manager = first = None
        self.assertIsNone(gone())
        manager = cudagraph_trees.get_manager(0)
        for is_left_out in (False, True):  # as another thread uses graphs
            self.enterContext(mock.patch.object(home, "is_left_out", lambda _, is_so=is_left_out: is_so))
            for graph in graphs:
                manager.running_forwards_with_pending_backwards = True
                graph.current_callable([])
                is_told = graph.fx_kwargs["is_backward"] and not is_left_out
                self.assertEqual(manager.running_forwards_with_pending_backwards, not is_told)


class TestUngraphed(OnCpuTestCase):
    """What our manager makes of un-graphed calls between graphed ones."""

    def calls(self, manager):
        self.enterContext(mock.patch.object(cudagraph_trees, "get_manager", lambda *_, **__: manager))
        return (choice.as_upstream_has_it(lambda inputs: ["un-graphed"], mode, 0) for mode in ("forward", "backward"))

    def test_a_forward_begins_a_step_unless_another_call_has_the_turn_and_a_backward_does_not(self):
        """Outputs that are held keep their values; a forward awaits its backward."""
        function, other = Function(mode=cudagraph_trees.CompilationMode.BACKWARD), ["of another call"]
        manager = function.manager
        forward, backward = self.calls(manager)
        for call, is_taken, begins in ((backward, False, False), (forward, True, False), (forward, False, True)):
            (output,) = function.call(3.0)
            node, manager.current_gen = manager.current_node, 0
            self.assertTrue(not is_taken or manager.take_turn(other))
            self.assertEqual(call([]), ["un-graphed"])
            manager.end_turn(other)
            self.assertIs(manager.current_node, None if begins else node)
            self.assertEqual(manager.current_gen == manager.get_curr_generation(), not is_taken)
            self.assertEqual(manager.running_forwards_with_pending_backwards, call is forward)
            self.assertTrue(manager.take_turn(other))
            backward([])  # of a thread that runs beside another one's call, which may await its own
            self.assertEqual(manager.running_forwards_with_pending_backwards, call is forward)
            manager.end_turn(other)
            backward([])
            self.assertFalse(manager.running_forwards_with_pending_backwards)
            function.call(4.0)
            self.assertEqual(output, torch.full((SIZE,), 3.0))

    def test_a_call_that_was_let_in_runs_ungraphed_once_another_thread_has_taken_over(self):
        function = Function()
        with mock.patch.object(calls, "is_used_elsewhere", lambda _: True):
            self.assertRaisesRegex(AssertionError, "no replay", function.call, 3.0, fast=False)
        (output,) = function.call(4.0, fast=False)
        self.assertEqual(output, torch.full((SIZE,), 4.0))

    def test_a_path_ends_in_any_state(self):
        for state in ("execution", "recording", "warmup"):
            path_state = cudagraph_trees.ExecutionState[state.upper()]
            forward, _ = self.calls(bare_manager(path_state=path_state, current_node=object(), current_gen=-7))
            with (
                mock.patch.object(Upstream, "can_start_new_generation", lambda _: True),
                mock.patch.object(Manager, f"try_end_curr_{state}") as ended,
            ):
                forward([])
            ended.assert_called_once()


class TestRoom(TestCase):
    def test_a_trial_takes_no_more_memory_than_the_process_may(self):
        manager = SimpleNamespace(pool=SimpleNamespace(nbytes=lambda: 100), device_index=0)
        for free, fraction, reserved, allocated, has_room in (
            (500, 1.0, 300, 200, True),
            (500, 0.35, 300, 200, False),  # 50 bytes may be taken
            (500, 0.45, 300, 200, True),
            (50, 1.0, 300, 200, False),
            (50, 1.0, 300, 40, True),  # 160 bytes that torch has reserved are in no pool
        ):
            answers = {"mem_get_info": (free, 1000), "get_per_process_memory_fraction": fraction}
            answers |= {"memory_reserved": reserved, "memory_allocated": allocated}
            functions = {name: mock.Mock(return_value=answer) for name, answer in answers.items()}
            with mock.patch.multiple(torch.cuda, **functions):
                self.assertEqual(choice.has_room_for_another(manager), has_room)


if __name__ == "__main__":
    run_tests()
