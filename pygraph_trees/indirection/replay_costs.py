"""What replays of a recording take by one route, gathered from looks at a few of them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

LEAST_TIMED = 5  # launches that a figure of the GPU needs


class Clock(Protocol):
    """Of a recording's launches, as a :class:`~.launch_clock.LaunchClock` is."""

    def time_next(self) -> None: ...
    def took_us(self) -> float | None: ...


@dataclass(frozen=True, slots=True)
class Middle:
    """Of figures in us: their median, and that of how far they lie from it."""

    us: float
    about: float

    @staticmethod
    def of(values: Sequence[float]) -> Middle:
        """Raises ``statistics.StatisticsError`` where there is none."""
        us = statistics.median(values)
        return Middle(us, statistics.median(abs(value - us) for value in values))


@dataclass(frozen=True, slots=True)
class Took:
    """What replays took. A replay sets nodes where its inputs lie elsewhere than at the one before."""

    set_us: float  # the host, to set the nodes of a replay that sets any
    share: float  # of replays that do, from 0 to 1
    gpu: Middle | None  # the GPU, for a replay that it was idle before; None where too few were timed
    step: Middle  # from one replay to the next, with whatever else the program does


@dataclass(frozen=True, slots=True)
class _Look:
    node_us: float
    count: int
    is_idle: bool
    replays: int
    set_calls: int
    at_s: float


class Looks:
    """Taken one after another; each but the last one begins an interval."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._all: list[_Look] = []
        self._gpu_us: list[float] = []

    def __len__(self) -> int:
        return len(self._all)

    @property
    def timed(self) -> int:
        """How many launches the GPU was timed for."""
        return len(self._gpu_us)

    def clear(self) -> None:
        self._all.clear()
        self._gpu_us.clear()

    def add(self, us: float, count: int, replays: int, set_calls: int, *, is_idle: bool) -> None:
        """Between the setting of nodes and the launch.

        Args:
            us, count: how long it took to set the nodes, and how many they were; at least one.
            replays, set_calls: how many there were so far, replays and nodes set.
            is_idle: whether the GPU has nothing to do.
        """
        took_us = self._clock.took_us()
        if self._all and took_us is not None:  # else of a launch before the first look
            self._gpu_us.append(took_us)
        self._all.append(_Look(us / count, count, is_idle, replays, set_calls, time.perf_counter()))
        if is_idle:  # else the time would begin before the launch
            self._clock.time_next()

    def node_us(self) -> float:
        """What it took to set one node."""
        return statistics.median(look.node_us for look in self._all)

    def nodes(self) -> float:
        """How many were set in a replay, in the mean."""
        first, last = self._all[0], self._all[-1]
        return (last.set_calls - first.set_calls) / (last.replays - first.replays)

    def waiting(self) -> float:
        """How often the GPU was idle, from 0 to 1."""
        return sum(look.is_idle for look in self._all) / len(self._all)

    def took(self) -> Took:
        steps = [
            (then.at_s - look.at_s) * 1e6 / (then.replays - look.replays)
            for look, then in zip(self._all, self._all[1:], strict=False)
        ]
        return Took(
            set_us=statistics.median(look.node_us * look.count for look in self._all),
            share=min(1.0, self.nodes() / statistics.median(look.count for look in self._all)),
            gpu=Middle.of(self._gpu_us) if len(self._gpu_us) >= LEAST_TIMED else None,
            step=Middle.of(steps),
        )
