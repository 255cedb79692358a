"""Calls until the routes of inputs are chosen, with a clock and a report that the test controls."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

from torch.testing._internal.common_utils import TestCase, run_tests

from pygraph_trees.benchmark import settling
from pygraph_trees.benchmark.settling import CALLS, call_until_chosen, routes_of
from pygraph_trees.report.log import FunctionLog, journal


def function(route: str | None, *, awaits_table: bool = False) -> FunctionLog:
    return FunctionLog("f", None, "inference", 1, {}, route=route, awaits_table=awaits_table)


class TestSettling(TestCase):
    def setUp(self) -> None:
        super().setUp()
        self.now, self.each_s = 0.0, 1e-4
        self.functions: list[FunctionLog] = []
        for target, name, value in (
            (settling, "time", SimpleNamespace(monotonic=lambda: self.now)),
            (journal, "records", lambda: ((), tuple(found.record() for found in self.functions))),
        ):
            self.enterContext(mock.patch.object(target, name, value))

    def calls(self, first: int = 0, then: Any = lambda number: None, **more: float) -> int:
        """The number of calls that are made."""
        count = 0

        def call() -> None:
            nonlocal count
            count += 1
            self.now += self.each_s
            then(count)

        call_until_chosen(call, first, **more)
        return count

    def test_calls_end_when_a_route_can_be_chosen(self) -> None:
        self.assertEqual(self.calls(), CALLS)
        for route in (None, "by address: few kernels"):
            self.functions = [function(route)]
            self.assertEqual(self.calls(), CALLS)

    def test_calls_go_on_until_a_chosen_table_is_in_use(self) -> None:
        self.functions = [function(None), function("by address, until a table", awaits_table=True)]

        def then(number: int) -> None:
            if number == 3 * CALLS:
                self.functions[1].route_was_found("by table: many kernels")

        self.assertEqual(self.calls(then=then), 3 * CALLS)
        self.assertEqual(self.calls(), CALLS)

    def test_a_table_that_never_comes_is_awaited_for_a_minute(self) -> None:
        self.functions, self.each_s = [function("by address, until a table", awaits_table=True)], 0.1
        self.assertEqual(self.calls(), 600)

    def test_routes_that_were_found_are_told(self) -> None:
        self.functions = [function("by address"), function(None), function("by table")]
        self.assertEqual(routes_of(slice(0, 2)), ["f, inference: by address"])
        self.assertEqual(routes_of(slice(1, 3)), ["f, inference: by table"])
        self.assertEqual(routes_of(slice(0)), [])


if __name__ == "__main__":
    run_tests()
