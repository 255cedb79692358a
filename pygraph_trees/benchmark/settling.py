"""Calls ahead of those that are measured: until it is chosen how inputs are given (``indirection.route_choice``)."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any

from pygraph_trees.indirection.route_choice import AWAITED, EVERY, EXPECTED, LOOKS
from pygraph_trees.report.log import journal
from pygraph_trees.report.text import title

CALLS = EVERY * (LOOKS + 2)  # with new addresses, within which a route is found to be better, or none
_MOST_S = 3.0  # that this may take, of a program with long calls
_AWAITED_S = 60.0  # in which a table that was found to be better has to be there, and to be judged


def call_until_chosen(call: Callable[[], Any], first: int, share: float = 1.0) -> None:
    """Calls a program until the routes of its inputs are chosen, and in use.

    Args:
        call: one call.
        first: the number of the program's first function in the report.
        share: of calls with inputs at other addresses than the one before; without any nothing is to be chosen.
    """
    calls = CALLS / share if share else CALLS
    began = time.monotonic()
    for number in itertools.count(1):
        call()
        spent_s = time.monotonic() - began
        if number % EVERY and spent_s < _MOST_S:
            continue
        is_long_enough = number >= calls or spent_s >= _MOST_S
        if is_long_enough and (spent_s >= _AWAITED_S or not _is_choice_awaited(first)):
            return


def functions_so_far() -> int:
    """The number of the next function in the report."""
    return len(journal.records()[1])


def routes_of(functions: slice) -> list[str]:
    """What was found of functions in the report, where something was: ``model 0/0, inference: table: ...``."""
    _, known = journal.records()
    return [f"{title(found)}, {found.mode}: {found.route}" for found in known[functions] if found.route is not None]


def _is_choice_awaited(first: int) -> bool:
    _, functions = journal.records()
    for function in functions[first:]:
        if function.route is not None and EXPECTED in function.route:
            return True
        inputs = function.recordings[-1].inputs if function.recordings else ()
        is_wanted = function.route is not None and AWAITED in function.route
        if is_wanted and inputs and all(given.route != "table" for given in inputs):
            return True
    return False
