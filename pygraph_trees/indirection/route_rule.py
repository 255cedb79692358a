"""The rule that chooses a recording's route: its inputs are patched unless a table pays.

A table pays if at least 16 kernels with variants hold at least 4 inputs whose addresses change. A :class:`RouteChooser`
decides that once, from counts of a recording's first replays with new addresses. If a table pays, it builds the
variants (:mod:`.table.builds`) and asks for another recording. A choice is kept for a function and its sizes, and
noted in the function's log.
"""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Callable, Collection, Hashable, Iterable
from typing import Any

from pygraph_trees.reasons import Reason, Why

from .table import builds
from .table.pointer_table import readers_of, taken_by_variants

REPLAYS = 64  # with new addresses: counted before the choice, and from one step of a build to the next
LEAST_CHANGES = REPLAYS // 4  # of an input's address; inputs that move less often count as staying
LEAST_KERNELS = 16
LEAST_INPUTS = 4

_PATIENCE = 64  # steps for which a function whose variants are built waits for other functions

_log = logging.getLogger("pygraph_trees.indirection")

KernelNames = Callable[[Collection[int]], Iterable[str | None]]  # of the nodes that hold an address of these inputs

BY_TABLE = (Reason.TABLE_AWAITED, Reason.TABLE)


def choose_route(kernels: int, inputs: int) -> Why:
    """Chooses by the inputs whose addresses change and that a table could hold, and the kernels that could read it."""
    if inputs < LEAST_INPUTS:
        return Reason.FEW_INPUTS(inputs=inputs, least=LEAST_INPUTS)
    if kernels < LEAST_KERNELS:
        return Reason.FEW_KERNELS(kernels=kernels, least=LEAST_KERNELS)
    return Reason.TABLE_AWAITED(kernels=kernels, inputs=inputs)


# By function and its sizes.
_choices: weakref.WeakKeyDictionary[Any, dict[Hashable, Why]] = weakref.WeakKeyDictionary()


def choice_of(function: Any, sizes: Hashable) -> Why | None:
    return _choices.get(function, {}).get(sizes)


def may_use_table(function: Any, sizes: Hashable) -> bool:
    """Whether a recording may get a table: true unless replays with these sizes were found not to need one."""
    choice = choice_of(function, sizes)
    return choice is None or choice.reason in BY_TABLE


def leave_table(function: Any, sizes: Hashable, error: BaseException) -> None:
    """Gives up the function's table for good, after a recording with it failed."""
    builds.give_up(function)
    take_choice(function, sizes, Reason.TABLE_NOT_RECORDED(error=str(error)))


def recorded(function: Any, sizes: Hashable, *, reads_table: bool) -> None:
    """Notes whether a new recording reads the table that was built for its function."""
    if not builds.is_over(function) or not taken_by_variants(function) or not may_use_table(function, sizes):
        return
    wanted = [choice for choice in list(_choices.get(function, {}).values()) if choice.reason in BY_TABLE]
    if not wanted:
        return
    if reads_table:
        take_choice(function, sizes, Reason.TABLE(**(choice_of(function, sizes) or wanted[0]).facts))
    else:
        _tell(function, Reason.TABLE_NOT_READ())


def take_choice(function: Any, sizes: Hashable, choice: Why) -> None:
    _choices.setdefault(function, {})[sizes] = choice
    _tell(function, choice)


def _tell(function: Any, choice: Why) -> None:
    function.log.route_was_found(choice, awaits_table=choice.reason is Reason.TABLE_AWAITED)


class RouteChooser:
    """Chooses the route of one recording whose inputs are patched, then takes the steps to its table."""

    def __init__(self, function: Any, sizes: Hashable) -> None:
        """``function``: its ``log`` gets the choice."""
        self.ready: Callable[[Why], None] | None = None  # called with a reason if it must be recorded again
        self._function, self._sizes = weakref.ref(function), sizes
        self._patience = _PATIENCE

    def may_choose(self, indices: Collection[int], names: KernelNames) -> bool:
        """Whether a table for these inputs may pay, or is chosen already."""
        if (function := self._function()) is None:
            return False
        choice = choose_route(*_counts(function, indices, names))
        may = choice_of(function, self._sizes) is not None or choice.reason in BY_TABLE
        function.log.is_choosing = function.log.is_choosing or may
        return may

    def go_on(self, changed: Collection[int], names: KernelNames) -> bool:
        """Chooses by the inputs whose addresses change, or takes a step of the build; whether more steps follow."""
        function, goes_on = self._function(), False
        if function is not None:
            try:
                goes_on = self._go_on(function, changed, names)
            except Exception as error:
                kind = type(error).__name__
                _log.warning("inputs are patched, because their route was not chosen: %s: %s", kind, error)
            function.log.is_choosing = goes_on
        return goes_on

    def _go_on(self, function: Any, changed: Collection[int], names: KernelNames) -> bool:
        if (choice := choice_of(function, self._sizes)) is None:
            choice = choose_route(*_counts(function, changed, names))
            take_choice(function, self._sizes, choice)
            if choice.reason is Reason.TABLE_AWAITED:
                builds.begin(function)
            return choice.reason is Reason.TABLE_AWAITED
        if choice.reason not in BY_TABLE:
            return False
        if (is_built := builds.go_on(function)) is None:
            return True
        if not is_built:
            take_choice(function, self._sizes, Reason.TABLE_NOT_COMPILED())
            return False
        # Functions that follow in the step are recorded again too, so functions wait for each other.
        _waiting.add(self)
        self._patience -= 1
        if self._patience and builds.is_any_under_way():
            return True
        with contextlib.suppress(KeyError):  # it is empty
            while True:
                if (ready := _waiting.pop().ready) is not None:
                    ready(Reason.TABLE_BUILT())
        return False


_waiting: weakref.WeakSet[RouteChooser] = weakref.WeakSet()  # of functions that can be recorded with a table


def chooser_for(function: Any, sizes: Hashable) -> RouteChooser | None:
    """For a recording without a table; None if no kernel could read one, or if the route is chosen."""
    if not readers_of(function) or builds.is_over(function) or not may_use_table(function, sizes):
        return None
    return RouteChooser(function, sizes)


def _counts(function: Any, indices: Collection[int], names: KernelNames) -> tuple[int, int]:
    """How many kernels could read some of these inputs in a table, and how many of the inputs they could read."""
    readers = readers_of(function)
    readable = {index for reader in readers for _, index in reader.inputs}.intersection(indices)
    kernels = {reader.kernel for reader in readers}
    return sum(name in kernels for name in names(readable)), len(readable)
