"""Whether calls are still what was decided for: a rule over looks at some of them.

A look says what one call took, the way that was decided, and whether the GPU had nothing to do when it began. The first
ones behind a decision say how calls are; when those of two windows, one after another, are otherwise, there is another
load: sizes, what else the host or the GPU is busy with, who waits for whom. What was measured may no longer hold then.
A window is of calls of the same sizes, one look after another: where sizes change all the time there is none.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Look:
    host_us: float  # until the call returned
    gpu_us: float  # between an event before and one after it
    is_idle: bool  # the GPU, when it began
    sizes: tuple[int, ...] = ()  # that it was given as integers


@dataclass(frozen=True, slots=True)
class ShiftRules:
    looks: int = 5  # of a window
    windows: int = 2
    factor: float = 1.5  # between times
    floor_us: float = 5.0  # by which they have to differ as well
    idle: float = 0.5  # between shares


class Shift:
    """The looks behind one decision."""

    def __init__(self, rules: ShiftRules = ShiftRules()) -> None:
        self._rules = rules
        self._first: Sequence[Look] = ()
        self._window: list[Look] = []
        self._other = 0  # windows one after another that are not as the first

    def accepts(self, look: Look) -> bool:
        """Whether, with this look, calls are found to be others."""
        if self._window and self._window[-1].sizes != look.sizes:
            self._window.clear()
        self._window.append(look)
        if len(self._window) < self._rules.looks:
            return False
        window, self._window = self._window, []
        if not self._first:
            self._first = window
            return False
        self._other = self._other + 1 if self._differ(self._first, window) else 0
        return self._other >= self._rules.windows

    def _differ(self, one: Sequence[Look], other: Sequence[Look]) -> bool:
        idle = (statistics.fmean(look.is_idle for look in looks) for looks in (one, other))
        return (
            self._are_apart(*(statistics.median(look.host_us for look in looks) for looks in (one, other)))
            or self._are_apart(*(statistics.median(look.gpu_us for look in looks) for looks in (one, other)))
            or abs(next(idle) - next(idle)) > self._rules.idle
        )

    def _are_apart(self, one_us: float, other_us: float) -> bool:
        less, more = sorted((one_us, other_us))
        return more > self._rules.factor * less and more - less > self._rules.floor_us
