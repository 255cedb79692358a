"""Calls until the routes of inputs are chosen, on a clock and a report of the test's own."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from torch.testing._internal.common_utils import TestCase, run_tests

from pygraph_trees.benchmark import settling
from pygraph_trees.benchmark.settling import CALLS, call_until_chosen, functions_so_far, routes_of
from pygraph_trees.indirection.route_choice import AWAITED, EXPECTED
from pygraph_trees.report.log import FunctionLog, RecordingLog, journal

BETTER = f"by address: 30 us of a replay against 5 us by a table, {AWAITED}"


def function(route: str | None, *routes: str) -> FunctionLog:
    inputs = tuple((0, None, "live", "cuda:0", 4, 0, False, given) for given in routes)
    return FunctionLog("f", None, "inference", 1, {}, route=route, recordings=[RecordingLog(inputs=inputs)])


class TestSettling(TestCase):
    def setUp(self) -> None:
        super().setUp()
        self.now, self.each_s = 0.0, 1e-4
        self.functions: list[FunctionLog] = []
        for target, name, value in (
            (settling, "time", SimpleNamespace(monotonic=lambda: self.now)),
            (journal, "records", lambda: ((), tuple(found.record() for found in self.functions))),
        ):
            patch = mock.patch.object(target, name, value)
            patch.start()
            self.addCleanup(patch.stop)

    def calls(self, first: int = 0, then: Any = lambda number: None, **more: float) -> int:
        """How many there are."""
        count = 0

        def call() -> None:
            nonlocal count
            count += 1
            self.now += self.each_s
            then(count)

        call_until_chosen(call, first, **more)
        return count

    def test_calls_are_as_many_as_a_choice_takes(self) -> None:
        self.assertEqual(self.calls(), CALLS)
        for route in (None, "by address: 2 us of a replay against 3 us by a table"):
            self.functions = [function(route, "patch")]
            self.assertEqual(self.calls(), CALLS)

    def test_calls_are_more_if_inputs_seldom_move_and_fewer_if_they_are_long(self) -> None:
        self.assertEqual(self.calls(share=0.5), 2 * CALLS)
        self.assertEqual(self.calls(share=0.0), CALLS)
        self.each_s = 0.5
        self.assertEqual(self.calls(), 6)

    def test_calls_go_on_until_a_table_is_there(self) -> None:
        self.functions = [function(None, "patch"), function(BETTER, "patch", "patch")]

        def then(number: int) -> None:
            if number == 3 * CALLS:
                self.functions[1].recordings.append(function(BETTER, "table", "patch").recordings[0])

        self.assertEqual(self.calls(then=then), 3 * CALLS)
        self.assertEqual(self.calls(), CALLS)

    def test_calls_go_on_until_a_table_is_judged(self) -> None:
        self.functions = [function(f"table: 5 us of a replay against 30 us by address, {EXPECTED} (2 of 2)", "table")]

        def then(number: int) -> None:
            if number == 2 * CALLS:
                self.functions[0].route = "table: 5 us of a replay and 9 of the GPU's, against 30 and 9 by address"

        self.assertEqual(self.calls(then=then), 2 * CALLS)

    def test_calls_end_if_a_table_never_comes(self) -> None:
        self.functions, self.each_s = [function(BETTER, "patch")], 0.1
        self.assertEqual(self.calls(), 600)

    def test_functions_of_other_programs_are_not_waited_for(self) -> None:
        self.functions = [function(BETTER, "patch")]
        first = functions_so_far()
        self.functions.append(function(None, "patch"))
        self.assertEqual((first, self.calls(first)), (1, CALLS))

    def test_routes_are_told_of_some_functions(self) -> None:
        self.functions = [function("by address", "patch"), function(None, "patch"), function("table", "table")]
        self.assertEqual(routes_of(slice(0, 2)), ["f, inference: by address"])
        self.assertEqual(routes_of(slice(1, 3)), ["f, inference: table"])
        self.assertEqual(routes_of(slice(0)), [])

    def test_a_function_without_recordings_is_not_waited_for(self) -> None:
        self.functions = [function(BETTER)]
        self.functions[0].recordings = []
        self.assertEqual(self.calls(), CALLS)


if __name__ == "__main__":
    run_tests()
