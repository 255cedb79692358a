"""A trial: the first calls of a compiled graph, run un-graphed and then graphed, until it is known which is better.

A :class:`Trial` is that of one compiled graph, its backward and all of their partitions, each of which is a
:class:`Contestant`. All go the same way in a step; which one that is changes where the first of them is called, and
never between a forward that is graphed and its backward. Each call of the program is made once, whatever is measured.

Un-graphed calls come first, and until they are done torch's trees do not know of the function: nothing was recorded
that would have to be taken back. Then it is graphed as torch would have it, and replays are measured. The host's time
is a clock's around the call; the GPU's lies between two events, of which nobody waits: they are looked at later. Where
the GPU is idle when a replay begins, what the host does before the launch lies between them too, and is taken off; of
an un-graphed call it cannot be, so no more than the graph's own time is believed.

A decision is looked after: now and then one more call is measured, the way that was taken (:meth:`Contestant.look`).
Where calls are found to be others than behind the decision (:mod:`.shift`), the trial begins anew, some times at most,
and the way changes where several measurements one after another speak against it.

Where an earlier process measured the same graph with inputs of the same shapes, what it decided holds from the first
call on, and nothing is measured.

A graph with dynamic shapes is given their sizes as integers. Steps with other integers than the first measured step had
are other work, and are not measured.

Where it takes too long (a backward or sizes that hardly ever come), or a function is called by a second thread, it is
graphed: but where graphed calls are recordings and hardly ever replays, and those took longer, it is not. A backward is
called by a thread of autograd's, so each function has a thread of its own; what the threads share has the trial's lock,
which no call takes once the trial is over.
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

_LEFT_OUT = {
    Way.UNGRAPHED: 2,
    Way.GRAPHED: 1,
}  # calls of each way that are not measured: kernels are chosen, caches fill
_MOST_STEPS = 100  # of a trial, without those of other integers; of these one after another
_MOST_RENEWALS = 3  # of a trial


class Watch(Protocol):
    """Clocks of the host and of the GPU's current stream."""

    def is_idle(self) -> bool:
        """Whether the GPU has done all that the stream was given."""

    def mark(self) -> Any:
        """A place in the stream."""

    def us_between(self, begin: Any, end: Any) -> float | None:
        """The GPU's time from one place to another; None where it has not come by."""

    def make_room(self) -> None:
        """Gives memory back that the other way has used: none is taken back while graphs are warmed up."""


class Memory(Protocol):
    """What is known of the graph from earlier processes."""

    def find(self, inputs: Sequence[object]) -> Profile | None:
        """What was decided, for such inputs of the function that is called first."""

    def store(self, decision: Decision) -> None:
        """Keeps what was decided for the inputs that were asked for."""


class GpuWatch:
    """Of a CUDA device."""

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
    """A call, of which the GPU may not be done yet."""

    is_idle: bool  # the GPU, before it
    host_us: float
    begin: Any  # marks in the stream
    end: Any

    def gpu_us(self, watch: Watch) -> float | None:
        return watch.us_between(self.begin, self.end)


@dataclass(slots=True)
class _Calls:
    """Measured calls of one way."""

    left_out: int  # calls that are still to be made before
    host_us: list[float] = field(default_factory=list)
    gpu_us: list[float] = field(default_factory=list)

    def sample(self, launches: int) -> Sample:
        return Sample.of(self.host_us, self.gpu_us, launches)


class Contestant:
    """One function in a trial: called in its place, it gives what the function gives.

    ``mode``: the function's, "forward", "backward" or "inference".
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
            ended: told the way that is taken from then on.
            began: told that the trial begins anew, and that calls are to come here again.
            handed: what graphed functions downstream would do if it were un-graphed.
            has_room: whether there is memory to run it un-graphed while its recordings are there.
        """
        self._trial, self._log, self._watch, self._ended, self._began = trial, log, watch, ended, began
        self._handed, self.has_room = handed, has_room
        self.mode = log.mode
        self._run = {Way.GRAPHED: graphed, Way.UNGRAPHED: ungraphed}
        self._thread: int | None = None
        self.calls = 0  # since a step began
        self._shift: Shift | None = None  # behind a decision
        self._looked: tuple[_Timed, tuple[int, ...]] | None = None  # and the integers that it was given
        self.start_over()

    def start_over(self) -> None:
        """Forgets what was measured."""
        self._calls = {way: _Calls(left_out) for way, left_out in _LEFT_OUT.items()}
        self._pending: deque[tuple[Way, _Timed]] = deque()
        self._graphed_us: deque[float] = deque(maxlen=_MOST_STEPS)  # the host's time, of the newest calls
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
                if way is Way.GRAPHED and self._counts() != before:  # who graphs may run it un-graphed
                    self._graphed_us.append(timed.host_us)
                    self._replays += timed.end is not None
                if timed.end is not None and self._trial.measures_step():
                    self._take(way, timed)
        return outputs

    def _timed(self, way: Way, inputs: list[Any]) -> tuple[Any, _Timed]:
        """A call; without an end where it was to be a replay, and was anything else."""
        before = self._counts()
        is_idle, begin = self._watch.is_idle(), self._watch.mark()
        start = time.perf_counter_ns()
        outputs = self._run[way](inputs)
        host_us = (time.perf_counter_ns() - start) / 1e3
        is_replay = way is Way.GRAPHED and self._counts() == (before[0] + 1, before[1])  # and nothing else
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
        """A call behind the trial, which is looked at; the trial may begin anew behind it."""
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
        """Whether the thread that calls is the one that called first."""
        thread = threading.get_ident()
        self._thread = self._thread or thread
        return thread == self._thread

    def _counts(self) -> tuple[int, int]:
        """Replays, and what else there is of graphs."""
        recordings = self._log.recordings
        return sum(recording.replays for recording in recordings), len(recordings) + self._log.warmups

    def collect(self) -> None:
        """Takes what the GPU is done with."""
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
        """Measured calls and those that the GPU is not done with."""
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
        """Calls are as they are from now on."""
        self._shift = self._looked = None

    def begin(self) -> None:
        """The trial begins anew."""
        self.look_anew()
        self.calls = 0
        self.start_over()
        self._began()

    def end(self, way: Way, why: str | None) -> None:
        self._pending.clear()
        self._log.decided(why, graphed=way is Way.GRAPHED)
        self._ended(way)


class Trial:
    """The functions that are decided together."""

    def __init__(
        self,
        objective: Objective,
        *,
        memory: Memory | None = None,
        rules: Rules = Rules(),  # noqa: B008
        graph: object = None,
    ) -> None:
        """``graph``: that began it, for who asks."""
        self._objective, self.rules, self._memory, self.graph = objective, rules, memory, graph
        self.backward: object = None  # the graph that is its backward, for who asks
        self._awaits_backward = False  # whether a forward was graphed whose backward is to come
        self.lock = threading.RLock()  # what is freed under it may call a function
        self._contestants: list[Contestant] = []
        self._behind: list[weakref.ref[Contestant]] = []  # those that ended, the one first whose calls begin steps
        self._way = Way.UNGRAPHED
        self._standing: Decision | None = None  # what holds while it is measured anew
        self._renewals = 0
        self._first: Contestant | None = None  # the one whose calls begin steps
        self._steps = 0
        self._others = 0  # steps of other integers since there was one of ours
        self._asked: tuple[int, ...] = ()  # integers that the memory was asked for
        self._integers: tuple[int, ...] | None = None  # of the steps that are measured
        self._given: tuple[int, ...] | None = ()  # of this step; None where none has begun since
        self._is_disturbed = False  # whether what was measured is not what other processes would find
        self._why: str | None = None  # the way that was taken in the end, in numbers
        self.decision: Decision | None = None
        self.is_over = False
        self.is_elsewhere = False  # whether it was ended by a thread that the functions are not called by

    def join(self, contestant: Contestant) -> None:
        """One more function; one that comes late goes the way of the others."""
        with self.lock:
            if self.is_over:
                self._behind.append(weakref.ref(contestant))
                contestant.end(self._way, self._why)
            else:
                self._contestants.append(contestant)

    @property
    def way(self) -> Way:
        """The one that is taken."""
        return self._way

    def may_be_renewed(self) -> bool:
        """Whether it is over, with a decision that may be another one some time."""
        return self.is_over and self.decision is not None and self._renewals < _MOST_RENEWALS

    def begin_anew(self) -> None:
        """Measures once more: from the next step on, the way that was decided until then."""
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
            # A forward may have been graphed whose backward is to come.
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
        """The way of a function's call that is about to be made."""
        if not self.is_over:
            with self.lock:
                if not self.is_over:
                    self._go_on(contestant, inputs)
        return self._way

    def measures_step(self) -> bool:
        """Whether this step is like those that were measured."""
        return self._given is not None and self._integers in (None, self._given)

    def was_measured(self) -> None:
        """Notes that a call of this step was."""
        self._integers = self._given
        self._is_disturbed |= _is_disturbed()

    def _go_on(self, contestant: Contestant, inputs: Sequence[object]) -> None:
        """Begins a step, or goes on with it."""
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
        """Ends the trial before it begins, where it was decided by an earlier process."""
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
        """Of the next measured call; None where there were enough."""
        made = {way: min(c.made(way) for c in self._contestants) for way in Way}
        enough = min(c.measured(way) for c in self._contestants for way in Way) >= self.rules.fewest_calls
        clear = enough and self._compare().clear
        found = next_way(made[Way.UNGRAPHED], made[Way.GRAPHED], clear, self.rules)
        if found is None and not enough:
            return self._way  # the GPU is behind
        return found

    def _give_up(self) -> None:
        """Ends the trial without a decision that would hold for others."""
        why = why_never_graphed([c.restless() for c in self._contestants], self.rules)
        self._end_undecided(Way.GRAPHED if why is None else Way.UNGRAPHED, why)

    def _end_undecided(self, way: Way, why: str | None) -> None:
        """What stood before stands."""
        standing = self._standing
        if standing is None:
            self._end(way, None, why)
        else:
            self._end(standing.way, standing, standing.text)

    def _compare(self) -> Comparison:
        return compare([c.part() for c in self._contestants], self._objective, self.rules)

    def _decide(self) -> None:
        decision = decide(self._compare(), self._standing, self.rules)
        if decision.against:  # once more, at once
            self._standing = decision
            self._start_over()
            for contestant in self._contestants:
                contestant.start_over()
            return
        memory = None if self._is_disturbed or self._integers != self._asked else self._memory
        if self._end(decision.way, decision, decision.text) and memory is not None:
            memory.store(decision)

    def _end(self, way: Way, decision: Decision | None, why: str | None) -> bool:
        """False where it is over already."""
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
    """Whether each call takes longer because somebody looks at it, or waits for it."""
    return bool(profiler._is_profiler_enabled) or os.environ.get("CUDA_LAUNCH_BLOCKING", "0") not in ("", "0")


def _integers(inputs: Sequence[object]) -> tuple[int, ...]:
    return tuple(value for value in inputs if isinstance(value, int))


def _ago(age_s: float) -> str:
    """``3 days ago``."""
    days = max(0.0, age_s) / 86400
    return "today" if days < 1 else f"{days:.0f} day{'s' if days >= 1.5 else ''} ago"
