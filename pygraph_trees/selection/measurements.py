"""The measured calls of one function, graphed and un-graphed.

:meth:`Measurements.time` runs a call once and times it; :meth:`Measurements.add` counts it as measured, and
:meth:`Measurements.collect` reads the times of calls that the GPU has finished. The first call of each way is not
measured, nor is a graphed call that is not a plain replay. Nothing waits for the GPU.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pygraph_trees.cuda import progress

from .decision import Call, Execution, Facts, Part

if TYPE_CHECKING:
    from collections.abc import Callable

    from pygraph_trees.report.log import FunctionLog

    Run = Callable[[list[Any]], Any]


class CudaDevice:
    """The CUDA device with this index, and its current stream."""

    def __init__(self, index: int) -> None:
        import torch

        self._cuda, self._index = torch.cuda, index

    def is_idle(self) -> bool:
        """Whether the GPU has finished the stream's work."""
        return progress.is_over(self._cuda.current_stream(self._index))

    def mark(self) -> Any:
        """Marks a place in the stream."""
        event = self._cuda.Event(enable_timing=True)
        event.record(self._cuda.current_stream(self._index))
        return event

    def us_between(self, begin: Any, end: Any) -> float | None:
        """GPU time between two marks; None if the GPU has not reached the second one."""
        return progress.us_between(begin, end)


@dataclass(frozen=True, slots=True)
class TimedCall:
    """A call whose GPU work may still be running."""

    was_idle: bool  # whether the GPU was idle before the call
    host_us: float
    begin: Any  # marks in the stream
    end: Any


class Measurements:
    def __init__(self, log: FunctionLog, device: CudaDevice) -> None:
        self._log, self._device = log, device
        self.start_over()

    def start_over(self) -> None:
        """Discards all measurements."""
        self._made: set[Execution] = set()  # ways whose first call, which fills caches, is made
        self._finished: dict[Execution, list[Call]] = {way: [] for way in Execution}
        self._pending: deque[tuple[Execution, TimedCall]] = deque()  # the GPU has not finished them

    def time(self, way: Execution, run: Run, inputs: list[Any]) -> tuple[Any, TimedCall | None]:
        """Runs a call; returns its outputs and its times, None for a graphed call that is no plain replay."""
        before = self._counts()
        was_idle, begin = self._device.is_idle(), self._device.mark()
        start = time.perf_counter_ns()
        outputs = run(inputs)
        host_us = (time.perf_counter_ns() - start) / 1e3
        after = self._counts()
        if way is Execution.GRAPHED and after != (before[0] + 1, before[1]):  # other graph activity
            return outputs, None
        return outputs, TimedCall(was_idle, host_us, begin, self._device.mark())

    def _counts(self) -> tuple[int, int]:
        """The number of replays, and of recordings and warm-ups."""
        recordings = self._log.recordings
        return sum(recording.replays for recording in recordings), len(recordings) + self._log.warmups

    def add(self, way: Execution, call: TimedCall) -> bool:
        """Adds a call; returns whether it is measured, as all but the first are."""
        is_measured = way in self._made
        self._made.add(way)
        if is_measured:
            self._pending.append((way, call))
        return is_measured

    def collect(self) -> None:
        """Reads the times of the calls that the GPU has finished."""
        while self._pending:
            way, call = self._pending[0]
            gpu_us = self._device.us_between(call.begin, call.end)
            if gpu_us is None:
                return
            self._pending.popleft()
            from_idle_us = gpu_us if call.was_idle else None
            if way is Execution.GRAPHED and call.was_idle:
                gpu_us = max(0.0, gpu_us - call.host_us)
            self._finished[way].append(Call(call.host_us, gpu_us, from_idle_us))

    def made(self, way: Execution) -> int:
        """Measured calls, including those that the GPU has not finished."""
        pending = list(self._pending)  # while Python code iterates, a finalizer may call the function
        return len(self._finished[way]) + sum(waiting is way for waiting, _ in pending)

    @property
    def pairs(self) -> int:
        """Measured calls of each way that the GPU has finished."""
        return min(map(len, self._finished.values()))

    def part(self, facts: Facts, handed: int) -> Part:
        """The function's part of a comparison."""
        ungraphed, graphed = (tuple(self._finished[way]) for way in (Execution.UNGRAPHED, Execution.GRAPHED))
        return Part(ungraphed, graphed, facts, handed)
