"""Which way the calls of a function go, and which manager may replay it."""

from __future__ import annotations

import gc
import sys
import weakref
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from fake_trees import replaying
from torch.testing._internal.common_utils import TestCase, run_tests

from pygraph_trees.trees.dispatch import Dispatch, Way
from pygraph_trees.trees.fast_path import entry


class Manager: ...


def replayed():
    """A dispatch and the manager that may replay its function."""
    dispatch, manager = Dispatch(), Manager()
    dispatch.add(of_integers=False)
    dispatch.may_be_replayed_by(manager, 7)
    return dispatch, manager


class TestManagers(TestCase):
    def test_a_function_is_replayed_if_it_was_added_once(self):
        for added, is_replayed in (
            ([False], True),
            ([True], False),  # each set of values is its own function
            ([False, False], False),
            ([], False),
        ):
            with self.subTest(added=added):
                dispatch, manager = Dispatch(), Manager()
                for of_integers in added:
                    dispatch.add(of_integers=of_integers)
                    self.assertIsNone(dispatch.manager())
                self.assertEqual(dispatch.is_added, bool(added))
                dispatch.may_be_replayed_by(manager, 7)
                found = dispatch.manager() is manager, dispatch.function_id == 7
                self.assertEqual(found, (is_replayed, is_replayed))
                del manager
                self.assertIsNone(dispatch.manager())

    def test_each_set_of_integers_is_replayed_by_itself(self):
        manager = replaying(lambda inputs, function_id: [function_id] if inputs[0] == "x" else None)
        dispatch = Dispatch()
        fast_call = entry(dispatch)
        for function_id, values in ((7, (3, 4)), (8, (3, 5))):
            dispatch.add(of_integers=True)
            dispatch.add_values(function_id, {1: values[0], 3: values[1]})
        first, second, unknown = ("x", 3, "y", 4), ("x", 3, "y", 5), ("x", 4, "y", 4)
        self.assertIsNone(fast_call([*first]))
        dispatch.may_be_replayed_by(manager, 7)
        self.assertEqual([fast_call([*i]) for i in (first, second, unknown)], [[7], None, None])
        dispatch.may_be_replayed_by(manager, 8)
        dispatch.may_be_replayed_by(manager, 9)  # the id of another function
        self.assertEqual([fast_call([*first]), fast_call([*second])], [[7], [8]])
        self.assertIsNone(fast_call(["z", 3, "y", 4]))

        dispatch.go(Way.UNGRAPHED, len)
        self.assertIsNone(fast_call([*first]))
        dispatch.go(Way.REPLAYED)
        self.assertEqual(fast_call([*first]), [7])
        dispatch.add(of_integers=True)  # from another thread: calls with those values are no longer fast
        dispatch.add_values(10, {1: 3, 3: 4})
        dispatch.may_be_replayed_by(manager, 10)
        self.assertEqual([fast_call([*first]), fast_call([*second])], [None, [8]])
        del manager
        self.assertIsNone(fast_call([*second]))

    def test_a_dispatch_is_freed_at_once(self):
        dispatch, manager = replayed()
        gone = weakref.ref(dispatch)
        gc.disable()
        try:
            del dispatch
            self.assertIsNone(gone())
        finally:
            gc.enable()
        del manager


class TestWays(TestCase):
    def test_only_replayed_calls_are_given_a_manager(self):
        dispatch, manager = replayed()
        for way in Way:
            call = None if way is Way.REPLAYED else len
            dispatch.go(way, call)
            self.assertEqual((dispatch.way, dispatch.call), (way, call))
            self.assertIs(dispatch.manager(), manager if way is Way.REPLAYED else None)
            seen = []
            self.assertEqual(dispatch.replay(lambda _: seen.append(dispatch.manager()) or "outputs", []), "outputs")  # noqa: B023
            self.assertEqual(seen, [manager])
            self.assertIs(dispatch.manager(), manager if way is Way.REPLAYED else None)
        dispatch.go(Way.MEASURED, len)
        self.assertRaises(ZeroDivisionError, dispatch.replay, lambda _: 1 / 0, [])
        self.assertIsNone(dispatch.manager())


if __name__ == "__main__":
    run_tests()
