"""Calls before those that are measured: until the routes of inputs are chosen (``indirection.route_rule``)."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any

from pygraph_trees.indirection.route_rule import SAMPLES
from pygraph_trees.indirection.sampler import EVERY
from pygraph_trees.report.log import journal
from pygraph_trees.report.text import title

CALLS = EVERY * (SAMPLES + 2)  # with new addresses, within which a route is chosen
_MOST_S = 3.0  # that this may take, of a program with long calls
_AWAITED_S = 60.0  # in which a table that was chosen has to be in use


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
        if is_long_enough and (spent_s >= _AWAITED_S or not _is_table_awaited(first)):
            return


def functions_so_far() -> int:
    """The number of the next function in the report."""
    return len(journal.records()[1])


def routes_of(functions: slice) -> list[str]:
    """What was found of functions in the report, where something was: ``model 0/0, inference: table: ...``."""
    _, known = journal.records()
    return [f"{title(found)}, {found.mode}: {found.route}" for found in known[functions] if found.route is not None]


def _is_table_awaited(first: int) -> bool:
    _, functions = journal.records()
    return any(function.awaits_table for function in functions[first:])
