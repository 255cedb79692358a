"""Calls until the routes of inputs are chosen, with a clock that the test controls."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from unittest import mock

from torch.testing._internal.common_utils import TestCase, run_tests

from pygraph_trees.benchmark import timing
from pygraph_trees.benchmark.timing import CALLS, call_until_chosen, functions_so_far
from pygraph_trees.report.log import FunctionLog, journal


class TestSettling(TestCase):
    def setUp(self) -> None:
        super().setUp()
        self.first = functions_so_far()

    def function(self, route: str | None, *, awaits_table: bool = False) -> FunctionLog:
        found = FunctionLog("f", None, "inference", 1, {}, route=route, awaits_table=awaits_table)
        journal.add_function(found)
        return found

    def calls(self, share: float = 1.0, each_s: float = 1e-4, then: Callable[[int], None] = lambda number: None) -> int:
        """The number of calls that are made."""
        count = 0

        def call() -> None:
            nonlocal count
            count += 1
            then(count)

        with mock.patch.object(timing, "time", SimpleNamespace(monotonic=lambda: count * each_s)):
            call_until_chosen(call, self.first, share)
        return count

    def test_calls_end_when_a_route_can_be_chosen(self) -> None:
        """Inputs that move at some calls take more calls, and long calls end after some seconds."""
        for route in (None, "by address: few kernels"):
            self.assertEqual([self.calls(share) for share in (1.0, 0.5, 0.0)], [CALLS, 2 * CALLS, CALLS])
            self.assertEqual(self.calls(each_s=0.5), 6)
            self.function(route)

    def test_calls_go_on_until_a_chosen_table_is_in_use(self) -> None:
        """For a minute at most, and only for functions of this program."""
        self.function(None)
        waiting = self.function("by address, until a table", awaits_table=True)
        self.assertEqual(self.calls(each_s=0.1), 600)

        def then(number: int) -> None:
            if number == 3 * CALLS:
                waiting.route_was_found("by table: many kernels")

        self.assertEqual([self.calls(then=then), self.calls()], [3 * CALLS, CALLS])
        self.function("by address, until a table", awaits_table=True)
        self.first = functions_so_far()
        self.assertEqual(self.calls(), CALLS)


if __name__ == "__main__":
    run_tests()
