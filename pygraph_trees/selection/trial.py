"""Decides whether functions are graphed: at once if the answer is plain, otherwise by measured calls of both ways.

A :class:`Trial` makes the calls of functions that are decided together, its :class:`TrialMember` objects. No call is
repeated, and nothing waits for the GPU. README.md tells which calls are measured.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import logging
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Sequence
from datetime import date
from typing import Any, NamedTuple, Protocol

from pygraph_trees.cuda.progress import CudaDevice
from pygraph_trees.locks import run_if_free
from pygraph_trees.reasons import Why
from pygraph_trees.report.log import FunctionLog
from pygraph_trees.report.naming import BACKWARD, FORWARD
from pygraph_trees.settings import is_disturbed

from .decision import FEWEST_PAIRS, Call, Comparison, Execution, Facts, Part, compare, decide, next_way, plain_way
from .profiles import Kept

Run = Callable[[list[Any]], Any]

_log = logging.getLogger("pygraph_trees.selection")

_MOST_STEPS = 60  # until all functions are recorded, and without a measured call
_MOST_CALLS = 300  # of one function in a step
_MOST_REFUSED = 200  # requests of one trial for the turn after the holder's last one
_LOST_AFTER = 16  # forwards of one step among which backwards come: another backward never comes


class Environment(Protocol):
    """What a member asks of the function's surroundings."""

    def ended(self, way: Execution) -> None: ...  # notes the way that is taken from now on
    def handed(self) -> int: ...  # the outputs that graphed functions take by address if this one is un-graphed
    def why_not_tried(self) -> Why | None: ...  # why un-graphed calls would disturb other functions too much


class TimedCall(NamedTuple):
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
        if way is Execution.GRAPHED and self._counts() != (before[0] + 1, before[1]):  # other graph activity
            return outputs, None
        return outputs, TimedCall(way, was_idle, host_us, (begin, self._device.mark()))

    def _counts(self) -> tuple[int, int]:
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
        ungraphed, graphed = self.finished[Execution.UNGRAPHED], self.finished[Execution.GRAPHED]
        return Part(ungraphed, graphed, facts, self.environment.handed())

    def end(self, way: Execution, why: str | None) -> None:
        self.start_over()
        self.log.is_tried = False
        self.log.decided(why, graphed=way is Execution.GRAPHED)
        self.environment.ended(way)


class Phase(enum.Enum):
    RECORDING = enum.auto()  # calls are graphed; some functions have no recording yet
    WAITING = enum.auto()  # calls are graphed; another trial measures
    MEASURING = enum.auto()
    OVER = enum.auto()


class Turn:
    """The turn to measure, which the trials of a process pass on: un-graphed calls change the measurements of others.

    A trial keeps it until it is over, or until its functions are no longer called. There is no lock, since a finalizer
    might wait for it: if two threads take the turn at once, one loses it at its next step.
    """

    def __init__(self) -> None:
        self._holder: weakref.ref[Trial] | None = None
        self._refused = Counter[int]()  # requests by trial, since the holder's last one

    def take(self, trial: Trial) -> bool:
        """Gives the turn to a trial, or lets it keep the turn; returns whether the trial has it."""
        holder = None if self._holder is None else self._holder()
        if holder is not None and holder is not trial and not holder.is_over:
            self._refused[id(trial)] += 1
            if self._refused[id(trial)] <= _MOST_REFUSED:
                return False
        self._refused.clear()
        if holder is not trial:
            self._holder = weakref.ref(trial)
        return True


class Trial:
    """A group of functions that are decided together; it refers to them weakly."""

    _turn = Turn()  # of this process

    def __init__(self, *, memory: Kept | None = None, graph: object = None, turn: Turn = _turn) -> None:
        self._memory, self._turn = memory, turn
        self.graph = graph  # for callers that ask: the one that started the trial
        self.backward: object = None  # the backward graph
        self._lock = threading.Lock()  # for changes; nobody waits for it
        self._later: deque[Callable[[], object]] = deque()
        self._members: list[weakref.ref[TrialMember]] = []
        self.way = Execution.GRAPHED  # currently taken
        self.phase = Phase.RECORDING
        self._steps = 0  # consecutive steps without a measured call
        self._made: dict[Execution, int] = {}  # measured calls when the last step began
        self._asked: tuple[int, ...] = ()  # integers of the memory's lookup
        self._integers: tuple[int, ...] | None = None  # integers of the measured steps
        self._given: tuple[int, ...] = ()  # the last ones
        self._is_disturbed = False  # whether other processes would measure something else
        self._why: str | None = None  # the final way, in numbers
        self.compared: Comparison | None = None  # what was decided by measurement

    @property
    def is_over(self) -> bool:
        return self.phase is Phase.OVER

    def join(self, member: TrialMember) -> None:
        """Adds a function; one that joins after the end goes the way of the others."""
        self._change(functools.partial(self._join, member))

    def _join(self, member: TrialMember) -> None:
        self._members.append(weakref.ref(member))
        if self.is_over:
            member.end(self.way, self._why)

    def leave(self, member: TrialMember) -> None:
        """Removes a function that is no longer decided by the trial; without the last one, the trial ends."""
        self._change(functools.partial(self._leave, member))

    def _leave(self, member: TrialMember) -> None:
        member.log.is_tried = False
        self._members = [reference for reference in self._members if reference() not in (None, member)]
        if not self._members:
            self._end(Execution.GRAPHED, None)

    def give_up(self) -> None:
        """Ends the trial without a decision."""
        self._change(functools.partial(self._end, Execution.GRAPHED, None))

    def _change(self, change: Callable[[], object], *, is_needed: bool = True) -> bool:
        """Makes a change; during another one, after that if it is needed, otherwise not at all: then returns False."""
        if is_needed:
            self._later.append(change)
        is_made = is_needed or run_if_free(self._lock, change)
        while self._later and run_if_free(self._lock, self._make_next):
            pass
        return is_made

    def _make_next(self) -> None:
        if self._later:  # otherwise another thread has made it
            self._later.popleft()()

    def call(self, member: TrialMember, inputs: list[Any]) -> Any:
        """Makes a function's call; returns its outputs. It is measured if its step has the measured integers."""
        is_alone = True  # whether no other thread, and no call around this one, prepares for a call
        if not self.is_over:
            if is_alone := member.is_in_its_thread():
                is_alone = self._change(functools.partial(self._go_on, member, inputs), is_needed=False)
            else:
                self.give_up()
        way = self.way
        if self.phase is not Phase.MEASURING or not is_alone:
            return member.run[way](inputs)
        outputs, timed = member.timed(way, inputs)
        if timed is not None:
            self._change(functools.partial(self._add, member, timed), is_needed=False)
        return outputs

    def _add(self, member: TrialMember, timed: TimedCall) -> None:
        counts = self.phase is Phase.MEASURING and self._integers in (None, self._given)
        if counts and member.add(timed):
            self._integers = self._given
            self._is_disturbed |= is_disturbed()

    def _alive(self) -> list[TrialMember]:
        return [member for reference in self._members if (member := reference()) is not None]

    def _go_on(self, member: TrialMember, inputs: Sequence[object]) -> None:
        members = self._alive()
        if self.is_over or member not in members:  # or its joining waits for another thread's change
            return
        is_first = not any(other.begins_steps for other in members)
        if is_first or member.begins_steps:
            self._given = tuple(value for value in inputs if isinstance(value, int))
        if is_first:
            member.begins_steps, self._asked = True, self._given
            profile = None if self._memory is None else self._memory.find(inputs)
            if profile is not None:  # an earlier process decided
                self._end(profile.way, f"{profile.text}, as measured on {date.fromtimestamp(profile.decided_s)}")
                return
        if member.begins_steps and _is_step_over(member, members):
            self._step(members)
        member.calls += 1
        if self._steps > _MOST_STEPS or member.calls > _MOST_CALLS:  # the trial takes too long
            logs = [other.log for other in members]
            if all(log.warmups > 0 and not (log.recordings or log.lacked) for log in logs):
                self._end(Execution.UNGRAPHED, f"{Execution.UNGRAPHED.value}: nothing could be recorded")
            else:
                self._end(Execution.GRAPHED, None)

    def _step(self, members: Sequence[TrialMember]) -> None:
        """Begins a step; decides without a measurement once everything is recorded, if that is possible."""
        for member in members:
            member.calls = 0
            member.collect()
        if self.phase is not Phase.RECORDING:
            self._measure(members)
            return
        if len(facts := _facts(members)) < len(members):
            self._steps += 1
        elif (plain := plain_way(facts)) is not None:
            self._end(plain, plain.plain_text(facts))
        elif reasons := [why for member in members if (why := member.environment.why_not_tried()) is not None]:
            self._end(Execution.GRAPHED, f"{Execution.GRAPHED.value}: {reasons[0]}")
        else:
            self.phase = Phase.WAITING
            self._measure(members)

    def _measure(self, members: Sequence[TrialMember]) -> None:
        """Chooses the way of this step, or decides; waits while another trial measures."""
        if not self._turn.take(self):
            self.phase, self.way = Phase.WAITING, Execution.GRAPHED
            return
        if self.phase is Phase.WAITING:
            self.phase, self._steps, self._made, self._integers = Phase.MEASURING, 0, {}, None
            for member in members:
                member.start_over()
        made = {way: min(member.made(way) for member in members) for way in Execution}
        compared = None
        if all(len(calls) >= FEWEST_PAIRS for member in members for calls in member.finished.values()):
            compared = compare([member.part(own) for member, own in zip(members, _facts(members), strict=True)])
        wanted = next_way(made, is_clear=compared is not None and compared.is_clear)
        if wanted is not None:
            self.way = wanted
            self._steps = self._steps + 1 if made == self._made else 0
            self._made = made
        elif compared is not None:  # otherwise the GPU has not caught up
            self._decide(compared)

    def _decide(self, compared: Comparison) -> None:
        way = decide(compared)
        self._end(way, text := compared.text(way))
        self.compared = compared
        modes = {member.log.mode for member in self._alive()}
        is_whole = BACKWARD in modes or FORWARD not in modes  # a later process may have the backward
        is_kept = compared.is_clear and is_whole and not self._is_disturbed and self._integers == self._asked
        if is_kept and self._memory is not None:
            self._memory.store(way, text)

    def _end(self, way: Execution, why: str | None) -> None:
        """Ends the trial, unless it is over already."""
        if self.is_over:
            return
        self.way, self._why, self.phase = way, why, Phase.OVER
        with contextlib.ExitStack() as stack:  # an interrupt or an error of one member leaves out no other
            for member in self._alive():
                stack.callback(member.end, way, why)
        _log.info("%s", why or f"{way.value}: not enough calls could be measured")


def _facts(members: Sequence[TrialMember]) -> list[Facts]:
    return [facts for member in members if (facts := member.facts()) is not None]


def _is_step_over(first: TrialMember, members: Sequence[TrialMember]) -> bool:
    """Whether the first function's next call begins a step: its forwards had their backwards, or one never will."""
    # Until then the way must not change.
    counts = (member.calls for member in members if member.log.mode == BACKWARD)
    backwards = next(counts, first.calls)  # one partition counts
    return first.calls <= backwards or (backwards > 0 and first.calls > _LOST_AFTER)
