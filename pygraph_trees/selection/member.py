"""One function of a trial: its calls graphed and un-graphed, and their times.

:meth:`TrialMember.timed` makes a call and times it; :meth:`TrialMember.add` counts it as measured, and
:meth:`TrialMember.collect` reads the times of calls that the GPU has finished. The first call of each way is not
measured, nor is a graphed call that is not a plain replay. No call is repeated, and nothing waits for the GPU.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pygraph_trees.reasons import Why

from .decision import Call, Execution, Facts, Part

if TYPE_CHECKING:
    from pygraph_trees.cuda.progress import CudaDevice
    from pygraph_trees.report.log import FunctionLog

    Run = Callable[[list[Any]], Any]


class Environment:
    """What a member asks of the function's surroundings; the answers here are those of a function alone."""

    def ended(self, way: Execution) -> None:
        """Notes the way that is taken from now on."""

    def handed(self) -> int:
        """The outputs that graphed functions downstream take by address if this one is un-graphed."""
        return 0

    def why_not_tried(self) -> Why | None:
        """Why un-graphed calls would disturb other functions too much; None if they would not."""
        return None


@dataclass(frozen=True, slots=True)
class TimedCall:
    """A call whose GPU work may still be running."""

    way: Execution
    was_idle: bool  # whether the GPU was idle before the call
    host_us: float
    marks: tuple[Any, Any]  # in the stream, around the call


class TrialMember:
    """A function of a trial, with the state of its measurements."""

    def __init__(
        self, log: FunctionLog, graphed: Run, ungraphed: Run, device: CudaDevice, environment: Environment
    ) -> None:
        """``graphed`` warms up, records and replays; ``ungraphed`` runs the compiled code. Both consume the inputs."""
        self.log, self._device, self.environment = log, device, environment
        log.is_tried = True
        self.run = {Execution.GRAPHED: graphed, Execution.UNGRAPHED: ungraphed}  # makes a call that is not measured
        self._thread: int | None = None
        self.begins_steps = False  # whether a call may begin a step: one member's do
        self.calls = 0  # since a step began
        self.start_over()

    def start_over(self) -> None:
        """Discards all measurements."""
        self._made: set[Execution] = set()  # ways whose first call, which fills caches, is made
        self.finished: dict[Execution, list[Call]] = {way: [] for way in Execution}  # measured calls
        self._pending: deque[TimedCall] = deque()  # the GPU has not finished them

    def timed(self, way: Execution, inputs: list[Any]) -> tuple[Any, TimedCall | None]:
        """Makes a call; returns its outputs and its times, None for a graphed call that is no plain replay."""
        self.log.trial_runs += way is Execution.UNGRAPHED
        before = self._counts()
        was_idle, begin = self._device.is_idle(), self._device.mark()
        start = time.perf_counter_ns()
        outputs = self.run[way](inputs)
        host_us = (time.perf_counter_ns() - start) / 1e3
        after = self._counts()
        if way is Execution.GRAPHED and after != (before[0] + 1, before[1]):  # other graph activity
            return outputs, None
        return outputs, TimedCall(way, was_idle, host_us, (begin, self._device.mark()))

    def _counts(self) -> tuple[int, int]:
        """The number of replays, and of recordings and warm-ups."""
        return self.log.replays, len(self.log.recordings) + self.log.warmups

    def add(self, call: TimedCall) -> bool:
        """Adds a call; returns whether it is measured, as all but the first of its way are."""
        is_measured = call.way in self._made
        self._made.add(call.way)
        if is_measured:
            self._pending.append(call)
        return is_measured

    def collect(self) -> None:
        """Reads the times of the calls that the GPU has finished."""
        while self._pending and (gpu_us := self._device.us_between(*self._pending[0].marks)) is not None:
            call = self._pending.popleft()
            from_idle_us = gpu_us if call.was_idle else None
            if call.way is Execution.GRAPHED and call.was_idle:
                gpu_us = max(0.0, gpu_us - call.host_us)
            self.finished[call.way].append(Call(call.host_us, gpu_us, from_idle_us))

    def made(self, way: Execution) -> int:
        """Measured calls, including those that the GPU has not finished."""
        pending = list(self._pending)  # while Python code iterates, a finalizer may call the function
        return len(self.finished[way]) + sum(call.way is way for call in pending)

    def is_in_its_thread(self) -> bool:
        """Whether the calling thread is the one of the first call."""
        self._thread = self._thread or threading.get_ident()
        return threading.get_ident() == self._thread

    def facts(self) -> Facts | None:
        """The facts of its newest recording; None if there is none."""
        if not self.log.recordings:
            return None
        last = self.log.recordings[-1]
        routes, launches = last.routes, None if last.kernels is None else last.kernels + (last.other_nodes or 0)
        by_address = routes.total() - routes["copy"]
        return Facts(launches, by_address, routes["copy"], last.copied_bytes, last.has_fast_path)

    def part(self, facts: Facts) -> Part:
        """The function's part of a comparison."""
        finished = self.finished
        return Part(finished[Execution.UNGRAPHED], finished[Execution.GRAPHED], facts, self.environment.handed())

    def end(self, way: Execution, why: str | None) -> None:
        """Notes the way that is taken from now on, and why."""
        self.start_over()
        self.log.is_tried = False
        self.log.decided(why, graphed=way is Execution.GRAPHED)
        self.environment.ended(way)
