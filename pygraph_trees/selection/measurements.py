"""The measured calls of one function, graphed and un-graphed.

:meth:`Measurements.time` runs a call once and times it; :meth:`Measurements.add` counts it as measured, and
:meth:`Measurements.collect` reads the times of calls that the GPU has finished. The first call of each way is not
measured, nor is a graphed call that is not a plain replay. Nothing waits for the GPU.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .decision import Call, Execution, Facts, Handed, Part
from .device import TimedCall

if TYPE_CHECKING:
    from collections.abc import Callable

    from pygraph_trees.report.log import FunctionLog

    from .device import CudaDevice

    Run = Callable[[list[Any]], Any]

_UNMEASURED = 1  # calls of each way: caches fill


@dataclass(slots=True)
class _Calls:
    """Measured calls of one way."""

    unmeasured: int = _UNMEASURED  # calls to make before the first measured one
    finished: list[Call] = field(default_factory=list)


class Measurements:
    def __init__(self, log: FunctionLog, device: CudaDevice) -> None:
        self._log, self._device = log, device
        self.start_over()

    def start_over(self) -> None:
        """Discards all measurements."""
        self._calls = {way: _Calls() for way in Execution}
        self._pending: deque[tuple[Execution, TimedCall]] = deque()  # the GPU has not finished them

    def time(self, way: Execution, run: Run, inputs: list[Any]) -> tuple[Any, TimedCall]:
        """Runs a call; returns its outputs and its times."""
        before = self._counts()
        was_idle, begin = self._device.is_idle(), self._device.mark()
        start = time.perf_counter_ns()
        outputs = run(inputs)
        host_us = (time.perf_counter_ns() - start) / 1e3
        after = self._counts()
        is_replay = way is Execution.GRAPHED and after == (before[0] + 1, before[1])  # no other graph activity
        end = self._device.mark() if is_replay or way is Execution.UNGRAPHED else None
        return outputs, TimedCall(was_idle, host_us, begin, end)

    def _counts(self) -> tuple[int, int]:
        """The number of replays, and of recordings and warm-ups."""
        recordings = self._log.recordings
        return sum(recording.replays for recording in recordings), len(recordings) + self._log.warmups

    def add(self, way: Execution, call: TimedCall) -> bool:
        """Adds a call with an end mark; returns whether it is measured, as all but the first are."""
        calls = self._calls[way]
        if calls.unmeasured:
            calls.unmeasured -= 1
            return False
        self._pending.append((way, call))
        return True

    def collect(self) -> None:
        """Reads the times of the calls that the GPU has finished."""
        while self._pending:
            way, call = self._pending[0]
            gpu_us = call.gpu_us(self._device)
            if gpu_us is None:
                return
            self._pending.popleft()
            from_idle_us = gpu_us if call.was_idle else None
            if way is Execution.GRAPHED and call.was_idle:
                gpu_us = max(0.0, gpu_us - call.host_us)
            self._calls[way].finished.append(Call(call.host_us, gpu_us, from_idle_us))

    def drop_pending(self) -> None:
        self._pending.clear()

    def finished(self, way: Execution) -> int:
        """Measured calls that the GPU has finished."""
        return len(self._calls[way].finished)

    def made(self, way: Execution) -> int:
        """Measured calls, including those that the GPU has not finished."""
        pending = list(self._pending)  # while Python code iterates, a finalizer may call the function
        return self.finished(way) + sum(waiting is way for waiting, _ in pending)

    def facts(self, *, has_fast_path: bool) -> Facts | None:
        """The facts of the newest recording; None if there is none, or if its nodes are not known.

        Args:
            has_fast_path: whether the process has a fast path.
        """
        if not self._log.recordings:
            return None
        last = self._log.recordings[-1]
        if last.kernels is None:
            return None
        routes = last.routes
        launches, copied = last.kernels + (last.other_nodes or 0), routes["copy"]
        is_fast = has_fast_path and last.has_fast_path
        return Facts(launches, routes.total() - copied, copied, last.copied_bytes, is_fast)

    def part(self, handed: Handed) -> Part:
        """The function's part of a comparison; both ways must have finished calls."""
        last = self._log.recordings[-1]
        launches = max(1, (last.kernels or 0) + (last.other_nodes or 0))
        ungraphed, graphed = (self._calls[way].finished for way in (Execution.UNGRAPHED, Execution.GRAPHED))
        return Part(tuple(ungraphed), tuple(graphed), launches, handed, last.kernels or 0, last.copied_bytes)
