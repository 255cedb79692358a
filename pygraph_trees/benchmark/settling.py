"""Makes calls before the measured ones, until a program has chosen how its inputs are given.

:func:`call_until_chosen` calls the program until ``indirection.route_rule`` has decided and its choice is in use, or
until a limit of calls or time is reached. The measured calls thus exclude the choice itself. :func:`routes_of`
describes the choices.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any

from pygraph_trees.indirection.route_rule import REPLAYS
from pygraph_trees.report.log import journal
from pygraph_trees.report.text import title

CALLS = 2 * REPLAYS  # calls with new addresses, within which a route is chosen
_MOST_S = 3.0  # limit of the time, for programs with long calls
_AWAITED_S = 60.0  # time in which a chosen table has to be in use


def call_until_chosen(call: Callable[[], Any], first: int, share: float = 1.0) -> None:
    """Calls a program until the routes of its inputs are chosen and in use.

    Args:
        call: makes one call.
        first: the number of the program's first function in the report.
        share: fraction of calls whose inputs have moved since the previous call; with 0 nothing is chosen.
    """
    calls = CALLS / share if share else CALLS
    began = time.monotonic()
    for number in itertools.count(1):
        call()
        spent_s = time.monotonic() - began
        if number % REPLAYS and spent_s < _MOST_S:
            continue
        is_long_enough = number >= calls or spent_s >= _MOST_S
        is_table_awaited = any(function.awaits_table for function in journal.records()[1][first:])
        if is_long_enough and (spent_s >= _AWAITED_S or not is_table_awaited):
            return


def functions_so_far() -> int:
    """The number of the next function in the report."""
    return len(journal.records()[1])


def routes_of(functions: range) -> list[str]:
    """The choices made for functions in the report: ``model 0/0, inference: table: ...``."""
    known = journal.records()[1][functions.start : functions.stop]
    return [f"{title(found)}, {found.mode}: {found.route}" for found in known if found.route is not None]
