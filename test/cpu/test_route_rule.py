"""The rule that chooses routes: its thresholds, its single decision, and the steps to a table."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Sequence
from typing import Any
from unittest import mock

from test_launches import FakeAutotuner
from torch.testing._internal.common_utils import TestCase, run_tests

from pygraph_trees.indirection import route_rule
from pygraph_trees.indirection.route_rule import RouteChooser, choose_route, chooser_for
from pygraph_trees.indirection.table import builds
from pygraph_trees.indirection.table import pointer_table as table
from pygraph_trees.indirection.table.pointer_table import Reader
from pygraph_trees.reasons import Reason
from pygraph_trees.report.log import FunctionLog


class Function:
    def __init__(self) -> None:
        self.log = FunctionLog("f", None, "inference", 1, {})


class TestRule(TestCase):
    def test_a_table_needs_16_kernels_and_4_inputs(self) -> None:
        for facts, text in (
            ((16, 4), ", until a table for 16 kernels that read 4 inputs is built"),
            ((15, 4), ": 15 kernels could read inputs from a table, fewer than 16"),
            ((16, 3), ": 3 inputs that a table could hold have changing addresses, fewer than 4"),
        ):
            self.assertEqual(str(choose_route(*facts)), f"by address{text}")


class TestChooser(TestCase):
    """A function whose 6 inputs are read by 20 kernels with variants and one without; a build takes 2 steps."""

    def setUp(self) -> None:
        super().setUp()
        self.is_built = True
        self.kernels: Sequence[str | None] = [*["kernel"] * 20, "other", None]
        inputs = frozenset((f"in_ptr{index}", index) for index in range(6))
        self.readers = {0: Reader(FakeAutotuner("kernel"), frozenset({"in_ptr0"}), inputs)}
        for target, name, value in (
            (route_rule, "_choices", weakref.WeakKeyDictionary()),
            (route_rule, "_waiting", weakref.WeakSet()),
            (builds, "_builds", weakref.WeakKeyDictionary()),
            (builds, "go_on", self.build),
            (table, "_readers", weakref.WeakKeyDictionary()),
            (table, "_taken", weakref.WeakKeyDictionary()),
        ):
            self.enterContext(mock.patch.object(target, name, value))
        self.renew()

    def renew(self) -> None:
        self.steps, self.reasons = 2, list[str]()
        self.function = Function()
        table._readers[self.function] = self.readers

    def build(self, function: Any, device: int) -> bool | None:
        self.steps -= 1
        if self.steps > 0:
            return None
        builds._builds[function] = None
        if self.is_built:
            table.take(function, {0})
        return self.is_built

    def made(self) -> RouteChooser:
        """The chooser of a recording that was just made."""
        chooser = chooser_for(self.function, 0, 0)
        assert chooser is not None
        chooser.ready = self.reasons.append
        return chooser

    def names(self, indices: Collection[int]) -> Sequence[str | None]:
        return self.kernels if indices else ()

    def steps_of(self, chooser: RouteChooser, most: int = 1000, changed: Collection[int] = range(5)) -> int:
        """Makes the choice and further steps until no more follow; returns their number."""
        return next((n for n in range(1, most) if not chooser.go_on(changed, self.names)), most)

    @property
    def choice(self) -> Reason | None:
        found = route_rule.choice_of(self.function, 0)
        return None if found is None else found.reason

    def test_a_table_is_chosen_and_built_and_recorded_once(self) -> None:
        chooser, log = self.made(), self.function.log
        self.assertTrue(chooser.may_choose(range(6), self.names) and log.is_choosing)
        self.assertTrue(chooser.go_on(range(5), self.names) and log.is_choosing)
        self.assertEqual((self.choice, log.awaits_table), (Reason.TABLE_AWAITED, True))
        self.assertEqual(self.steps_of(chooser), 2)
        self.assertFalse(log.is_choosing)
        self.assertEqual(self.reasons, [Reason.TABLE_BUILT()])
        route_rule.recorded(self.function, 0, reads_table=True)
        self.assertEqual((self.choice, self.function.log.awaits_table), (Reason.TABLE, False))
        self.assertEqual(self.function.log.route, "by table: 20 kernels read 5 inputs whose addresses change")
        self.assertIsNone(chooser_for(self.function, 0, 0))

    def test_a_decision_against_a_table_is_final(self) -> None:
        for changed, kernels, reason in (
            (range(3), self.kernels, Reason.FEW_INPUTS),
            (range(3, 9), self.kernels, Reason.FEW_INPUTS),  # no kernel reads the last three in a table
            ((), self.kernels, Reason.FEW_INPUTS),  # addresses that seldom change
            (range(6), self.kernels[5:], Reason.FEW_KERNELS),
        ):
            self.renew()
            other = self.made()
            with mock.patch.object(self, "kernels", kernels):
                self.assertEqual(self.steps_of(self.made(), changed=changed), 1)
            self.assertEqual((self.choice, self.reasons), (reason, []))
            self.assertEqual((self.steps_of(other), self.choice), (1, reason))  # another recording takes it over
            # Recorded again it is patched at once, also if another size of the function has a table by then.
            table.take(self.function, {0})
            self.assertIsNone(chooser_for(self.function, 0, 0))
            self.assertFalse(route_rule.may_use_table(self.function, 0))
            self.assertTrue(route_rule.may_use_table(self.function, 1))

    def test_functions_wait_for_each_other_but_not_for_ever(self) -> None:
        """A function after another one in a step is recorded again with it."""
        chooser, other = self.made(), Function()
        builds.begin(other, 0)
        self.assertEqual((self.steps_of(chooser, most=20), self.reasons), (20, []))
        builds.give_up(other)
        self.assertEqual((self.steps_of(chooser), len(self.reasons)), (1, 1))
        self.renew()
        builds.begin(third := Function(), 0)
        self.assertEqual(self.steps_of(self.made()), 2 + route_rule._PATIENCE)
        self.assertEqual((len(self.reasons), builds.is_over(third)), (1, False))

    def test_kernels_that_cannot_be_compiled_or_an_error_leave_inputs_patched(self) -> None:
        self.is_built = False
        self.assertEqual(self.steps_of(self.made()), 3)
        self.assertEqual(
            (self.choice, self.reasons, self.function.log.awaits_table), (Reason.TABLE_NOT_COMPILED, [], False)
        )
        self.renew()
        with (
            mock.patch.object(builds, "begin", side_effect=RuntimeError("of the test")),
            self.assertLogs("pygraph_trees.indirection", "WARNING") as logs,
        ):
            self.assertEqual(self.steps_of(self.made()), 1)
        self.assertIn("of the test", logs.output[0])

    def test_a_recording_that_cannot_use_the_table_says_so_and_one_that_fails_leaves_it_for_good(self) -> None:
        self.steps_of(self.made())
        route_rule.recorded(self.function, 0, reads_table=False)
        self.assertEqual(self.function.log.route, "by address: a table is built, but this recording cannot use it")
        self.assertTrue(route_rule.may_use_table(self.function, 0))  # a recording elsewhere in the tree may
        route_rule.leave_table(self.function, 0, RuntimeError("of the {test}"))
        self.assertEqual(self.function.log.route, "by address: recording it with a table failed: of the {test}")
        self.assertEqual(table.taken_by_variants(self.function), frozenset())
        for sizes in (0, 1):
            self.assertIsNone(chooser_for(self.function, sizes, 0))

    def test_nothing_is_counted_for_a_recording_that_no_table_can_pay_for(self) -> None:
        chooser = self.made()
        self.assertTrue(chooser.may_choose(range(6), self.names))
        self.function.log.is_choosing = False
        self.assertFalse(chooser.may_choose(range(3), self.names) or self.function.log.is_choosing)
        with mock.patch.object(self, "kernels", self.kernels[5:]):
            self.assertFalse(chooser.may_choose(range(6), self.names))
        with mock.patch.dict(table._readers, {self.function: {}}):
            self.assertIsNone(chooser_for(self.function, 0, 0))

    def test_a_chooser_does_not_keep_its_function(self) -> None:
        chooser, gone = self.made(), weakref.ref(self.function)
        del self.function
        self.assertIsNone(gone())
        self.assertFalse(chooser.go_on((), self.names) or chooser.may_choose(range(6), self.names))


if __name__ == "__main__":
    run_tests()
