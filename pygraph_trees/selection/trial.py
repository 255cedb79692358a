"""Runs the first calls of a compiled graph un-graphed, then graphed, until one way proves better.

A :class:`Trial` covers a graph, its backward and their partitions. Each partition is a :class:`Contestant`, called in
place of the function. All go the same way in a step. No call is repeated. If a trial takes too long, or a second thread
calls a function, the graph is graphed, unless its graphed calls are mostly recordings and slower. README.md describes
the procedure.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

from torch.autograd import profiler

from pygraph_trees.report.naming import BACKWARD

from .decision import (
    Comparison,
    Decision,
    Handed,
    Objective,
    Part,
    Restless,
    Rules,
    Sample,
    Way,
    compare,
    decide,
    next_way,
    why_never_graphed,
)
from .shift import Look, Shift

if TYPE_CHECKING:
    from pygraph_trees.report.log import FunctionLog

    from .profiles import Profile

    Run = Callable[[list[Any]], Any]

_log = logging.getLogger("pygraph_trees.selection")

# Calls of each way that are not measured: kernels are chosen, caches fill.
_LEFT_OUT = {Way.UNGRAPHED: 2, Way.GRAPHED: 1}
_MOST_STEPS = 100  # with the measured integers, in a trial; also the limit of consecutive steps with others
_MOST_RENEWALS = 3  # of a trial


class Watch(Protocol):
    """Clocks for the host and for the GPU's current stream."""

    def is_idle(self) -> bool:
        """Whether the GPU has finished the stream's work."""

    def mark(self) -> Any:
        """Marks a place in the stream."""

    def us_between(self, begin: Any, end: Any) -> float | None:
        """GPU time between two marks; None if the GPU has not reached the second one."""

    def make_room(self) -> None:
        """Frees cached memory of the other way, which graph warm-up would not reclaim."""


class Memory(Protocol):
    """Decisions about the graph from earlier processes."""

    def find(self, inputs: Sequence[object]) -> Profile | None:
        """The stored decision for such inputs of the function that is called first."""

    def store(self, decision: Decision) -> None:
        """Stores a decision for the inputs of the last :meth:`find`."""


class GpuWatch:
    """A :class:`Watch` for a CUDA device."""

    def __init__(self, device: int) -> None:
        import torch

        self._cuda, self._device = torch.cuda, device

    def is_idle(self) -> bool:
        idle: bool = self._cuda.current_stream(self._device).query()
        return idle

    def mark(self) -> Any:
        event = self._cuda.Event(enable_timing=True)
        event.record(self._cuda.current_stream(self._device))
        return event

    def us_between(self, begin: Any, end: Any) -> float | None:
        return begin.elapsed_time(end) * 1e3 if end.query() else None

    def make_room(self) -> None:
        self._cuda.empty_cache()


@dataclass(frozen=True, slots=True)
class _Timed:
    """A measured call whose GPU work may still be running."""

    is_idle: bool  # whether the GPU is idle before the call
    host_us: float
    begin: Any  # marks in the stream
    end: Any

    def gpu_us(self, watch: Watch) -> float | None:
        return watch.us_between(self.begin, self.end)


@dataclass(slots=True)
class _Calls:
    """Measured calls of one way."""

    left_out: int  # calls to make before the first measured one
    host_us: list[float] = field(default_factory=list)
    gpu_us: list[float] = field(default_factory=list)

    def sample(self, launches: int) -> Sample:
        return Sample.of(self.host_us, self.gpu_us, launches)


class Contestant:
    """A function in a trial; calling it returns the function's outputs.

    ``mode`` is the function's: "forward", "backward" or "inference".
    """

    def __init__(
        self,
        trial: Trial,
        log: FunctionLog,
        graphed: Run,
        ungraphed: Run,
        watch: Watch,
        ended: Callable[[Way], None],
        began: Callable[[], None] = lambda: None,
        handed: Callable[[], Handed] = Handed,
        has_room: Callable[[], bool] = lambda: True,
    ) -> None:
        """
        Args:
            graphed: warms up, records and replays; consumes its inputs.
            ungraphed: runs the compiled code; consumes its inputs.
            ended: called with the way that is taken from then on.
            began: called if the trial starts again and needs the function's calls again.
            handed: the extra work of graphed functions downstream if this one is un-graphed.
            has_room: whether memory suffices to run it un-graphed while its recordings exist.
        """
        self._trial, self._log, self._watch, self._ended, self._began = trial, log, watch, ended, began
        self._handed, self.has_room = handed, has_room
        self.mode = log.mode
        self._run = {Way.GRAPHED: graphed, Way.UNGRAPHED: ungraphed}
        self._thread: int | None = None
        self.calls = 0  # since a step began
        self._shift: Shift | None = None  # set after a decision
        self._looked: tuple[_Timed, tuple[int, ...]] | None = None  # with the integers among its inputs
        self.start_over()

    def start_over(self) -> None:
        """Discards the measurements."""
        self._calls = {way: _Calls(left_out) for way, left_out in _LEFT_OUT.items()}
        self._pending: deque[tuple[Way, _Timed]] = deque()
        self._graphed_us: deque[float] = deque(maxlen=_MOST_STEPS)  # host time of the newest calls
        self._replays = 0

    def __call__(self, inputs: list[Any]) -> Any:
        way = self._trial.way_of(self, inputs)
        run = self._run[way]
        if self._trial.is_over:
            return run(inputs)
        self._log.trial_runs += way is Way.UNGRAPHED
        before = self._counts()
        outputs, timed = self._timed(way, inputs)
        with self._trial.lock:
            if not self._trial.is_over:
                if way is Way.GRAPHED and self._counts() != before:  # graphed code may run un-graphed as well
                    self._graphed_us.append(timed.host_us)
                    self._replays += timed.end is not None
                if timed.end is not None and self._trial.measures_step():
                    self._take(way, timed)
        return outputs

    def _timed(self, way: Way, inputs: list[Any]) -> tuple[Any, _Timed]:
        """Runs and times a call; there is no end mark if a call that should be a replay was anything else."""
        before = self._counts()
        is_idle, begin = self._watch.is_idle(), self._watch.mark()
        start = time.perf_counter_ns()
        outputs = self._run[way](inputs)
        host_us = (time.perf_counter_ns() - start) / 1e3
        is_replay = way is Way.GRAPHED and self._counts() == (before[0] + 1, before[1])  # no other graph activity
        end = self._watch.mark() if is_replay or way is Way.UNGRAPHED else None
        return outputs, _Timed(is_idle, host_us, begin, end)

    def _take(self, way: Way, timed: _Timed) -> None:
        calls = self._calls[way]
        if calls.left_out:
            calls.left_out -= 1
        elif self.made(way) < self._trial.rules.most_calls:
            self._trial.was_measured()
            self._pending.append((way, timed))

    def look(self, inputs: list[Any]) -> Any:
        """Runs a call after the trial and samples it; the trial may start again afterwards."""
        way = self._trial.way
        if not self._trial.may_be_renewed() or not self.is_in_its_thread():
            return self._run[way](inputs)
        sizes = _integers(inputs)
        outputs, timed = self._timed(way, inputs)
        looked, self._looked = self._looked, None if timed.end is None else (timed, sizes)
        if looked is not None:
            before, sizes = looked
            gpu_us = before.gpu_us(self._watch)
            if gpu_us is not None:
                self._shift = self._shift or Shift()
                if self._shift.accepts(Look(before.host_us, gpu_us, before.is_idle, sizes)):
                    self._trial.begin_anew()
        return outputs

    def is_in_its_thread(self) -> bool:
        """Whether the calling thread is the one of the first call."""
        thread = threading.get_ident()
        self._thread = self._thread or thread
        return thread == self._thread

    def _counts(self) -> tuple[int, int]:
        """The number of replays, and of recordings and warm-ups."""
        recordings = self._log.recordings
        return sum(recording.replays for recording in recordings), len(recordings) + self._log.warmups

    def collect(self) -> None:
        """Collects the calls that the GPU has finished."""
        while self._pending:
            way, timed = self._pending[0]
            gpu_us = timed.gpu_us(self._watch)
            if gpu_us is None:
                return
            self._pending.popleft()
            if way is Way.GRAPHED and timed.is_idle:
                gpu_us = max(0.0, gpu_us - timed.host_us)
            self._calls[way].host_us.append(timed.host_us)
            self._calls[way].gpu_us.append(gpu_us)

    def measured(self, way: Way) -> int:
        return len(self._calls[way].host_us)

    def made(self, way: Way) -> int:
        """Measured calls, including those that the GPU has not finished."""
        return self.measured(way) + sum(pending[0] is way for pending in self._pending)

    def restless(self) -> Restless:
        return Restless(self._calls[Way.UNGRAPHED].host_us, self._graphed_us, self._replays)

    def part(self) -> Part:
        last = self._log.recordings[-1]
        launches = (last.kernels or 0) + (last.other_nodes or 0)
        graphed = self._calls[Way.GRAPHED].sample(1)
        ungraphed = self._calls[Way.UNGRAPHED].sample(max(1, launches)).without_waits(graphed.gpu_us)
        return Part(ungraphed, graphed, self._handed(), last.kernels or 0, last.copied_bytes)

    def make_room(self) -> None:
        self._watch.make_room()

    def look_anew(self) -> None:
        """Takes the calls from now on as the reference."""
        self._shift = self._looked = None

    def begin(self) -> None:
        """Prepares for a new start of the trial."""
        self.look_anew()
        self.calls = 0
        self.start_over()
        self._began()

    def end(self, way: Way, why: str | None) -> None:
        self._pending.clear()
        self._log.decided(why, graphed=way is Way.GRAPHED)
        self._ended(way)


class Trial:
    """A group of functions that are decided together."""

    def __init__(
        self,
        objective: Objective,
        *,
        memory: Memory | None = None,
        rules: Rules = Rules(),  # noqa: B008
        graph: object = None,
    ) -> None:
        """``graph`` is the graph that started the trial, for callers that ask."""
        self._objective, self.rules, self._memory, self.graph = objective, rules, memory, graph
        self.backward: object = None  # the backward graph, for callers that ask
        self._awaits_backward = False  # a forward was graphed and its backward is still to come
        self.lock = threading.RLock()  # reentrant: freeing an object under it may call a function
        self._contestants: list[Contestant] = []
        self._behind: list[weakref.ref[Contestant]] = []  # after the end; the one whose calls begin steps is first
        self._way = Way.UNGRAPHED
        self._standing: Decision | None = None  # the decision in force during a new measurement
        self._renewals = 0
        self._first: Contestant | None = None  # the contestant whose calls begin steps
        self._steps = 0
        self._others = 0  # consecutive steps with other integers
        self._asked: tuple[int, ...] = ()  # integers of the memory's lookup
        self._integers: tuple[int, ...] | None = None  # integers of the measured steps
        self._given: tuple[int, ...] | None = ()  # this step's; None right after a new start
        self._is_disturbed = False  # whether other processes would measure something else
        self._why: str | None = None  # the final way, in numbers
        self.decision: Decision | None = None
        self.is_over = False
        self.is_elsewhere = False  # ended by a thread other than the functions' own

    def join(self, contestant: Contestant) -> None:
        """Adds a function; one that joins after the end goes the way of the others."""
        with self.lock:
            if self.is_over:
                self._behind.append(weakref.ref(contestant))
                contestant.end(self._way, self._why)
            else:
                self._contestants.append(contestant)

    @property
    def way(self) -> Way:
        """The way currently taken."""
        return self._way

    def may_be_renewed(self) -> bool:
        """Whether the trial is over with a decision that may still change."""
        return self.is_over and self.decision is not None and self._renewals < _MOST_RENEWALS

    def begin_anew(self) -> None:
        """Starts the measurement again: from the next step on, beginning with the way decided so far."""
        with self.lock:
            found = [contestant for reference in self._behind if (contestant := reference()) is not None]
            if not self.may_be_renewed() or not found or self._behind[0]() is not found[0]:
                return
            if self._way is Way.GRAPHED and not all(contestant.has_room() for contestant in found):
                _log.info("calls are no longer what was measured (%s): no memory to measure anew", self._why)
                for contestant in found:
                    contestant.look_anew()
                return
            self._renewals += 1
            self._behind, self._contestants, self._first = [], found, found[0]
            assert self.decision is not None
            self._standing = replace(self.decision, against=0)
            self.is_over = self._is_disturbed = False
            # A forward may already be graphed and its backward still to come.
            graphed = self._way is Way.GRAPHED
            self._awaits_backward = graphed and any(contestant.mode == BACKWARD for contestant in found)
            self._start_over()
            self._given = None
            for contestant in found:
                contestant.begin()
        _log.info("calls are no longer what was measured (%s): measured anew", self._why)

    def _start_over(self) -> None:
        self._steps = self._others = 0
        self._integers = None

    def way_of(self, contestant: Contestant, inputs: Sequence[object]) -> Way:
        """The way for the call that a function is about to make."""
        if not self.is_over:
            with self.lock:
                if not self.is_over:
                    self._go_on(contestant, inputs)
        return self._way

    def measures_step(self) -> bool:
        """Whether this step has the integers of the measured steps."""
        return self._given is not None and self._integers in (None, self._given)

    def was_measured(self) -> None:
        """Notes that a call of this step was measured."""
        self._integers = self._given
        self._is_disturbed |= _is_disturbed()

    def _go_on(self, contestant: Contestant, inputs: Sequence[object]) -> None:
        """Begins or continues a step."""
        if not contestant.is_in_its_thread():
            self.is_elsewhere = True
            self._end_undecided(Way.GRAPHED, None)
            return
        if self._first is None:
            self._first = contestant
            self._asked = _integers(inputs)
            if self._recalls(inputs):
                return
        contestant.calls += 1
        if contestant is self._first:
            self._given = _integers(inputs)
            self._step()
        elif contestant.calls > _MOST_STEPS:
            self._end_undecided(Way.GRAPHED, None)
        if contestant.mode != "inference":
            goes_graphed = contestant.mode == "forward" and self._way is Way.GRAPHED
            self._awaits_backward = goes_graphed and any(c.mode == BACKWARD for c in self._contestants)

    def _recalls(self, inputs: Sequence[object]) -> bool:
        """Ends the trial at once if an earlier process decided it."""
        profile = None if self._memory is None else self._memory.find(inputs)
        if profile is not None:
            decision = profile.decision
            self._end(decision.way, decision, f"{decision.text}, as measured {_ago(profile.age_s())}")
        return profile is not None

    def _step(self) -> None:
        if self.measures_step():
            self._steps += 1
            self._others = 0
        else:
            self._others += 1
        for contestant in self._contestants:
            contestant.calls = 0
            contestant.collect()
        wanted = self._next_way()
        if wanted is self._way or self._awaits_backward:
            if max(self._steps, self._others) > _MOST_STEPS:
                self._give_up()
        elif wanted is not None:
            self._way = wanted
            self._contestants[0].make_room()
        else:
            self._decide()

    def _next_way(self) -> Way | None:
        """The way of the next measured call; None if there are enough."""
        made = {way: min(c.made(way) for c in self._contestants) for way in Way}
        enough = min(c.measured(way) for c in self._contestants for way in Way) >= self.rules.fewest_calls
        clear = enough and self._compare().clear
        found = next_way(made[Way.UNGRAPHED], made[Way.GRAPHED], clear, self.rules)
        if found is None and not enough:
            return self._way  # the GPU has not caught up
        return found

    def _give_up(self) -> None:
        """Ends the trial without a decision that would hold for other processes."""
        why = why_never_graphed([c.restless() for c in self._contestants], self.rules)
        self._end_undecided(Way.GRAPHED if why is None else Way.UNGRAPHED, why)

    def _end_undecided(self, way: Way, why: str | None) -> None:
        """Ends the trial; an earlier decision stays in force."""
        standing = self._standing
        if standing is None:
            self._end(way, None, why)
        else:
            self._end(standing.way, standing, standing.text)

    def _compare(self) -> Comparison:
        return compare([c.part() for c in self._contestants], self._objective, self.rules)

    def _decide(self) -> None:
        decision = decide(self._compare(), self._standing, self.rules)
        if decision.against:  # measure again, at once
            self._standing = decision
            self._start_over()
            for contestant in self._contestants:
                contestant.start_over()
            return
        memory = None if self._is_disturbed or self._integers != self._asked else self._memory
        if self._end(decision.way, decision, decision.text) and memory is not None:
            memory.store(decision)

    def _end(self, way: Way, decision: Decision | None, why: str | None) -> bool:
        """Ends the trial; returns False if it is over already."""
        if self.is_over:
            return False
        self._way, self._why, self.decision, self.is_over = way, why, decision, True
        contestants, first, self._contestants, self._first = self._contestants, self._first, [], None
        contestants.sort(key=lambda contestant: contestant is not first)
        self._behind = [weakref.ref(contestant) for contestant in contestants]
        for contestant in contestants:
            contestant.end(way, why)
        _log.info("%s", why or f"{way.value}: not enough calls could be measured")
        return True


def _is_disturbed() -> bool:
    """Whether a profiler or a blocking launch mode slows down each call."""
    return bool(profiler._is_profiler_enabled) or os.environ.get("CUDA_LAUNCH_BLOCKING", "0") not in ("", "0")


def _integers(inputs: Sequence[object]) -> tuple[int, ...]:
    return tuple(value for value in inputs if isinstance(value, int))


def _ago(age_s: float) -> str:
    """``3 days ago``."""
    days = max(0.0, age_s) / 86400
    return "today" if days < 1 else f"{days:.0f} day{'s' if days >= 1.5 else ''} ago"
