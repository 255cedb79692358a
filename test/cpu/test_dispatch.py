"""Which way the calls of a function go, and which managers may replay it."""

from __future__ import annotations

import gc
import threading
import unittest
import weakref
from concurrent.futures import ThreadPoolExecutor

from fake_trees import manager_of, replaying
from torch._inductor.cudagraph_trees import FunctionID
from torch.testing._internal.common_utils import TestCase, run_tests

from pygraph_trees.native import binding
from pygraph_trees.trees.functions.dispatch import Dispatch, Way
from pygraph_trees.trees.functions.fast_path import entry

IDS = {number: FunctionID(number) for number in range(7, 12)}


class Manager: ...


def replayed():
    """A dispatch and the manager that may replay its function."""
    dispatch, manager = Dispatch(), Manager()
    dispatch.add(of_integers=False)
    dispatch.may_be_replayed_by(manager, 7)
    return dispatch, manager


def replaying_ids(*values):
    """A manager that replays calls whose first input is "x", and returns the id of the function and ``values``."""
    return replaying(lambda inputs, function_id: [function_id, *values] if inputs[0] == "x" else None)


@unittest.skipIf(binding.extension is None, "not built for this torch")
class TestManagers(TestCase):
    def test_a_function_is_replayed_if_it_was_added(self):
        for added, is_replayed in (
            ([False], True),
            ([True], False),  # each set of values is its own function
            ([False, False], True),
            ([], False),
        ):
            with self.subTest(added=added):
                dispatch, manager = Dispatch(), Manager()
                for of_integers in added:
                    dispatch.add(of_integers=of_integers)
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
            dispatch.add(of_integers=True)
            dispatch.add_values(manager, IDS[number], {1: values[0], 3: values[1]})
        first, second, unknown = ("x", 3, "y", 4), ("x", 3, "y", 5), ("x", 4, "y", 4)
        self.assertIsNone(fast_call([*first]))
        dispatch.may_be_replayed_by(manager, IDS[7])
        self.assertEqual([fast_call([*i]) for i in (first, second, unknown)], [[IDS[7]], None, None])
        dispatch.may_be_replayed_by(manager, IDS[8])
        dispatch.may_be_replayed_by(manager, IDS[9])  # the id of another function
        self.assertEqual([fast_call([*first]), fast_call([*second])], [[IDS[7]], [IDS[8]]])
        self.assertIsNone(fast_call(["z", 3, "y", 4]))

        dispatch.go(Way.UNGRAPHED, len)
        self.assertIsNone(fast_call([*first]))
        dispatch.go(Way.REPLAYED)
        self.assertEqual(fast_call([*first]), [IDS[7]])
        dispatch.add(of_integers=True)  # again
        dispatch.add_values(manager, IDS[10], {1: 3, 3: 4})
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


@unittest.skipIf(binding.extension is None, "not built for this torch")
class TestThreads(TestCase):
    def setUp(self):
        super().setUp()
        self.dispatch = Dispatch()
        self.fast_call = entry(self.dispatch)
        self.first, self.second = (self.enterContext(ThreadPoolExecutor(1)) for _ in range(2))

    def add(self, number, *values):
        """Adds the function to a manager of this thread, which is returned with a reference to its own memory."""
        manager, own = replaying_ids(number), Manager()
        self.dispatch.add(of_integers=bool(values))
        if values:
            self.dispatch.add_values(manager, IDS[number], dict(enumerate(values, 1)))
        self.dispatch.may_be_replayed_by(manager, IDS[number], None if values else own)
        return manager, weakref.ref(own)

    def in_both(self, call):
        """The results of calls in both threads, which take turns."""
        return [thread.submit(call).result(60) for _ in range(3) for thread in (self.first, self.second)]

    def test_each_thread_is_replayed_by_its_own_manager(self):
        held = [pool.submit(self.add, number).result(60) for pool, number in ((self.first, 7), (self.second, 8))]
        self.assertEqual(self.in_both(lambda: self.fast_call(["x"])), [[IDS[7], 7], [IDS[8], 8]] * 3)
        self.assertIsNone(self.fast_call(["x"]))  # from a third thread
        self.second.submit(self.dispatch.add, of_integers=False).result(60)  # again: its manager has another id
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
        threads = [threading.Thread(target=work, args=(number,)) for number in range(20, 28)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        self.assertEqual((wrong, len(self.dispatch.replayers)), ([], 8))


@unittest.skipIf(binding.extension is None, "not built for this torch")
class TestWays(TestCase):
    def test_only_replayed_calls_are_given_a_manager(self):
        dispatch, manager = replayed()
        for way in Way:
            call = None if way is Way.REPLAYED else len
            dispatch.go(way, call)
            self.assertEqual((dispatch.way, dispatch.call), (way, call))
            self.assertIs(manager_of(dispatch), manager if way is Way.REPLAYED else None)
            seen = []
            self.assertEqual(dispatch.replay(lambda _: seen.append(manager_of(dispatch)) or "outputs", []), "outputs")  # noqa: B023
            self.assertEqual(seen, [manager])
            self.assertIs(manager_of(dispatch), manager if way is Way.REPLAYED else None)
        dispatch.go(Way.MEASURED, len)
        self.assertRaises(ZeroDivisionError, dispatch.replay, lambda _: 1 / 0, [])
        self.assertIsNone(manager_of(dispatch))


if __name__ == "__main__":
    run_tests()
