"""Detects that calls have changed since a decision was made.

A :class:`Sample` holds the times of one call, run in the chosen way, and whether the GPU was idle before it. The first
window of samples after a decision is the reference. If two consecutive windows differ from it, the load has changed:
sizes, other work, or what waits for what. A window consists of consecutive samples with the same sizes; constantly
changing sizes never fill one.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Sample:
    host_us: float  # until the call returns
    gpu_us: float  # between an event before and one after the call
    was_idle: bool  # whether the GPU was idle before the call
    sizes: tuple[int, ...] = ()  # integers among the inputs


@dataclass(frozen=True, slots=True)
class DriftRules:
    samples: int = 5  # in a window
    windows: int = 2
    factor: float = 1.5  # ratio of times that counts as a change
    floor_us: float = 5.0  # difference that a change needs as well
    idle: float = 0.5  # difference of idle shares that counts as a change


class Drift:
    """The samples after one decision."""

    def __init__(self, rules: DriftRules = DriftRules()) -> None:
        self._rules = rules
        self._first: Sequence[Sample] = ()
        self._window: list[Sample] = []
        self._other = 0  # consecutive windows that differ from the first

    def add(self, sample: Sample) -> bool:
        """Adds a sample; returns whether the calls have changed."""
        if self._window and self._window[-1].sizes != sample.sizes:
            self._window.clear()
        self._window.append(sample)
        if len(self._window) < self._rules.samples:
            return False
        window, self._window = self._window, []
        if not self._first:
            self._first = window
            return False
        self._other = self._other + 1 if self._differ(self._first, window) else 0
        return self._other >= self._rules.windows

    def _differ(self, one: Sequence[Sample], other: Sequence[Sample]) -> bool:
        idle = (statistics.fmean(sample.was_idle for sample in samples) for samples in (one, other))
        return (
            self._are_apart(*(statistics.median(sample.host_us for sample in samples) for samples in (one, other)))
            or self._are_apart(*(statistics.median(sample.gpu_us for sample in samples) for samples in (one, other)))
            or abs(next(idle) - next(idle)) > self._rules.idle
        )

    def _are_apart(self, one_us: float, other_us: float) -> bool:
        less, more = sorted((one_us, other_us))
        return more > self._rules.factor * less and more - less > self._rules.floor_us
