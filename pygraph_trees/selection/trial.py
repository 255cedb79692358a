"""Runs the first calls of a compiled graph un-graphed, then graphed, until one way proves better.

A :class:`Trial` covers a graph, its backward and their partitions. Each partition is a :class:`TrialMember`, called in
place of the function. All go the same way in a step. No call is repeated. If a trial takes too long, or a second thread
calls a function, the graph is graphed, unless its graphed calls are mostly recordings and slower. README.md describes
the procedure.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch.autograd import profiler

from pygraph_trees.report.naming import BACKWARD

from .decision import (
    Comparison,
    Decision,
    Execution,
    Handed,
    Objective,
    Part,
    Rules,
    compare,
    decide,
    next_way,
    why_never_graphed,
)
from .drift import Drift, Sample
from .measurements import Measurements

if TYPE_CHECKING:
    from pygraph_trees.report.log import FunctionLog

    from .device import CudaDevice, TimedCall
    from .profiles import Kept

    Run = Callable[[list[Any]], Any]

_log = logging.getLogger("pygraph_trees.selection")

_MOST_STEPS = 100  # with the measured integers, in a trial; also the limit of consecutive steps with others
_MOST_RESTARTS = 3  # of a trial


class TrialMember:
    """A function in a trial; calling it returns the function's outputs.

    ``mode`` is the function's: "forward", "backward" or "inference".
    """

    def __init__(
        self,
        trial: Trial,
        log: FunctionLog,
        graphed: Run,
        ungraphed: Run,
        device: CudaDevice,
        ended: Callable[[Execution], None],
        restarted: Callable[[], None] = lambda: None,
        handed: Callable[[], Handed] = Handed,
        has_room: Callable[[], bool] = lambda: True,
    ) -> None:
        """
        Args:
            graphed: warms up, records and replays; consumes its inputs.
            ungraphed: runs the compiled code; consumes its inputs.
            ended: called with the way that is taken from then on.
            restarted: called if the trial starts again and needs the function's calls again.
            handed: the extra work of graphed functions downstream if this one is un-graphed.
            has_room: whether memory suffices to run it un-graphed while its recordings exist.
        """
        self._trial, self._log, self._device, self._ended, self._restarted = trial, log, device, ended, restarted
        self._handed, self.has_room = handed, has_room
        self.mode = log.mode
        self._run = {Execution.GRAPHED: graphed, Execution.UNGRAPHED: ungraphed}
        self._thread: int | None = None
        self.calls = 0  # since a step began
        self.measurements = Measurements(log, device)
        self._drift: Drift | None = None  # set after a decision
        self._sampled: tuple[TimedCall, tuple[int, ...]] | None = None  # with the integers among its inputs

    def __call__(self, inputs: list[Any]) -> Any:
        way = self._trial.way_of(self, inputs)
        run = self._run[way]
        if self._trial.is_over:
            return run(inputs)
        self._log.trial_runs += way is Execution.UNGRAPHED
        outputs, timed = self.measurements.time(way, run, inputs)
        with self._trial.lock:
            if not self._trial.is_over:
                if way is Execution.GRAPHED:
                    self.measurements.add_graphed(timed)
                counts = timed.end is not None and self._trial.measures_step()
                if counts and self.measurements.add(way, timed, self._trial.rules.most_calls):
                    self._trial.was_measured()
        return outputs

    def sample(self, inputs: list[Any]) -> Any:
        """Runs a call after the trial and samples it; the trial may start again afterwards."""
        way = self._trial.way
        if not self._trial.may_restart() or not self.is_in_its_thread():
            return self._run[way](inputs)
        sizes = _integers(inputs)
        outputs, timed = self.measurements.time(way, self._run[way], inputs)
        sampled, self._sampled = self._sampled, None if timed.end is None else (timed, sizes)
        if sampled is not None:
            before, sizes = sampled
            gpu_us = before.gpu_us(self._device)
            if gpu_us is not None:
                self._drift = self._drift or Drift()
                if self._drift.add(Sample(before.host_us, gpu_us, before.was_idle, sizes)):
                    self._trial.restart()
        return outputs

    def is_in_its_thread(self) -> bool:
        """Whether the calling thread is the one of the first call."""
        thread = threading.get_ident()
        self._thread = self._thread or thread
        return thread == self._thread

    def part(self) -> Part:
        return self.measurements.part(self._handed())

    def make_room(self) -> None:
        self._device.make_room()

    def reset_drift(self) -> None:
        """Takes the calls from now on as the reference."""
        self._drift = self._sampled = None

    def restart(self) -> None:
        """Prepares for a new start of the trial."""
        self.reset_drift()
        self.calls = 0
        self.measurements.start_over()
        self._restarted()

    def end(self, way: Execution, why: str | None) -> None:
        self.measurements.drop_pending()
        self._log.decided(why, graphed=way is Execution.GRAPHED)
        self._ended(way)


class Trial:
    """A group of functions that are decided together."""

    def __init__(
        self,
        objective: Objective,
        *,
        memory: Kept | None = None,
        rules: Rules = Rules(),  # noqa: B008
        graph: object = None,
    ) -> None:
        """``graph`` is the graph that started the trial, for callers that ask."""
        self._objective, self.rules, self._memory, self.graph = objective, rules, memory, graph
        self.backward: object = None  # the backward graph, for callers that ask
        self._awaits_backward = False  # a forward was graphed and its backward is still to come
        self.lock = threading.RLock()  # reentrant: freeing an object under it may call a function
        self._members: list[TrialMember] = []
        # After the end; the one whose calls begin steps is first.
        self._ended_members: list[weakref.ref[TrialMember]] = []
        self._way = Execution.UNGRAPHED
        self._standing: Decision | None = None  # the decision in force during a new measurement
        self._restarts = 0
        self._first: TrialMember | None = None  # the one whose calls begin steps
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

    def join(self, member: TrialMember) -> None:
        """Adds a function; one that joins after the end goes the way of the others."""
        with self.lock:
            if self.is_over:
                self._ended_members.append(weakref.ref(member))
                member.end(self._way, self._why)
            else:
                self._members.append(member)

    @property
    def way(self) -> Execution:
        """The way currently taken."""
        return self._way

    def may_restart(self) -> bool:
        """Whether the trial is over with a decision that may still change."""
        return self.is_over and self.decision is not None and self._restarts < _MOST_RESTARTS

    def restart(self) -> None:
        """Starts the measurement again: from the next step on, beginning with the way decided so far."""
        with self.lock:
            found = [member for reference in self._ended_members if (member := reference()) is not None]
            if not self.may_restart() or not found or self._ended_members[0]() is not found[0]:
                return
            if self._way is Execution.GRAPHED and not all(member.has_room() for member in found):
                _log.info("calls are no longer what was measured (%s): no memory to measure again", self._why)
                for member in found:
                    member.reset_drift()
                return
            self._restarts += 1
            self._ended_members, self._members, self._first = [], found, found[0]
            assert self.decision is not None
            self._standing = replace(self.decision, against=0)
            self.is_over = self._is_disturbed = False
            # A forward may already be graphed and its backward still to come.
            graphed = self._way is Execution.GRAPHED
            self._awaits_backward = graphed and any(member.mode == BACKWARD for member in found)
            self._start_over()
            self._given = None
            for member in found:
                member.restart()
        _log.info("calls are no longer what was measured (%s): measured again", self._why)

    def _start_over(self) -> None:
        self._steps = self._others = 0
        self._integers = None

    def way_of(self, member: TrialMember, inputs: Sequence[object]) -> Execution:
        """The way for the call that a function is about to make."""
        if not self.is_over:
            with self.lock:
                if not self.is_over:
                    self._go_on(member, inputs)
        return self._way

    def measures_step(self) -> bool:
        """Whether this step has the integers of the measured steps."""
        return self._given is not None and self._integers in (None, self._given)

    def was_measured(self) -> None:
        """Notes that a call of this step was measured."""
        self._integers = self._given
        self._is_disturbed |= _is_disturbed()

    def _go_on(self, member: TrialMember, inputs: Sequence[object]) -> None:
        """Begins or continues a step."""
        if not member.is_in_its_thread():
            self.is_elsewhere = True
            self._end_undecided(Execution.GRAPHED, None)
            return
        if self._first is None:
            self._first = member
            self._asked = _integers(inputs)
            if self._recalls(inputs):
                return
        member.calls += 1
        if member is self._first:
            self._given = _integers(inputs)
            self._step()
        elif member.calls > _MOST_STEPS:
            self._end_undecided(Execution.GRAPHED, None)
        if member.mode != "inference":
            goes_graphed = member.mode == "forward" and self._way is Execution.GRAPHED
            self._awaits_backward = goes_graphed and any(m.mode == BACKWARD for m in self._members)

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
        for member in self._members:
            member.calls = 0
            member.measurements.collect()
        wanted = self._next_way()
        if wanted is self._way or self._awaits_backward:
            if max(self._steps, self._others) > _MOST_STEPS:
                self._give_up()
        elif wanted is not None:
            self._way = wanted
            self._members[0].make_room()
        else:
            self._decide()

    def _next_way(self) -> Execution | None:
        """The way of the next measured call; None if there are enough."""
        made = {way: min(m.measurements.made(way) for m in self._members) for way in Execution}
        finished = min(m.measurements.finished(way) for m in self._members for way in Execution)
        enough = finished >= self.rules.fewest_calls
        clear = enough and self._compare().clear
        found = next_way(made[Execution.UNGRAPHED], made[Execution.GRAPHED], clear, self.rules)
        if found is None and not enough:
            return self._way  # the GPU has not caught up
        return found

    def _give_up(self) -> None:
        """Ends the trial without a decision that would hold for other processes."""
        why = why_never_graphed([m.measurements.restless() for m in self._members], self.rules)
        self._end_undecided(Execution.GRAPHED if why is None else Execution.UNGRAPHED, why)

    def _end_undecided(self, way: Execution, why: str | None) -> None:
        """Ends the trial; an earlier decision stays in force."""
        standing = self._standing
        if standing is None:
            self._end(way, None, why)
        else:
            self._end(standing.way, standing, standing.text)

    def _compare(self) -> Comparison:
        return compare([m.part() for m in self._members], self._objective, self.rules)

    def _decide(self) -> None:
        decision = decide(self._compare(), self._standing, self.rules)
        if decision.against:  # measure again, at once
            self._standing = decision
            self._start_over()
            for member in self._members:
                member.measurements.start_over()
            return
        memory = None if self._is_disturbed or self._integers != self._asked else self._memory
        if self._end(decision.way, decision, decision.text) and memory is not None:
            memory.store(decision)

    def _end(self, way: Execution, decision: Decision | None, why: str | None) -> bool:
        """Ends the trial; returns False if it is over already."""
        if self.is_over:
            return False
        self._way, self._why, self.decision, self.is_over = way, why, decision, True
        members, first, self._members, self._first = self._members, self._first, [], None
        members.sort(key=lambda member: member is not first)
        self._ended_members = [weakref.ref(member) for member in members]
        for member in members:
            member.end(way, why)
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
