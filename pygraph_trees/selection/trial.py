"""Decides whether functions are graphed: at once if the answer is plain, otherwise by measured calls of both ways.

A :class:`Trial` covers functions that are decided together. Each is a :class:`TrialMember`, called in place of the
function. All are graphed as torch would do it. If their recordings leave a doubt, steps run graphed and un-graphed in
turn until the answer is clear or enough is measured. No call is repeated. README.md describes the procedure.
"""

from __future__ import annotations

import enum
import logging
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from torch.autograd import profiler

from pygraph_trees.report.naming import BACKWARD

from .decision import (
    Comparison,
    Decision,
    Execution,
    Facts,
    Part,
    Rules,
    compare,
    decide,
    next_way,
    plain_text,
    plain_way,
)
from .environment import Environment
from .measurements import Measurements
from .turn import TURN

if TYPE_CHECKING:
    from pygraph_trees.report.log import FunctionLog

    from .device import CudaDevice
    from .profiles import Kept
    from .turn import Turn

    Run = Callable[[list[Any]], Any]

_log = logging.getLogger("pygraph_trees.selection")

_MOST_STEPS = 60  # with the measured integers, in a trial; also the limit of consecutive steps with others
_MOST_WAITED = 4096  # steps until the GPU must have finished what is measured
_LONGEST_ROW = 4 * _MOST_STEPS  # forwards of one step before their backwards
_LOST_AFTER = 16  # forwards of one step among which backwards come: another backward never comes


class Phase(enum.Enum):
    RECORDING = enum.auto()  # calls are graphed; some functions have no recording yet
    WAITING = enum.auto()  # calls are graphed; another trial measures
    MEASURING = enum.auto()
    OVER = enum.auto()


class TrialMember:
    """A function in a trial; calling it returns the function's outputs.

    ``mode`` is the function's: "forward", "backward" or "inference". The trial refers to it weakly.
    """

    def __init__(
        self,
        trial: Trial,
        log: FunctionLog,
        graphed: Run,
        ungraphed: Run,
        device: CudaDevice,
        environment: Environment,
    ) -> None:
        """
        Args:
            graphed: warms up, records and replays; consumes its inputs.
            ungraphed: runs the compiled code; consumes its inputs.
        """
        self._trial, self._log, self._device, self.environment = trial, log, device, environment
        self.mode = log.mode
        self._run = {Execution.GRAPHED: graphed, Execution.UNGRAPHED: ungraphed}
        self._thread: int | None = None
        self.calls = 0  # since a step began
        self.measurements = Measurements(log, device)

    def __call__(self, inputs: list[Any]) -> Any:
        trial = self._trial
        way = trial.way_of(self, inputs)
        run = self._run[way]
        if trial.phase is not Phase.MEASURING:
            return run(inputs)
        self._log.trial_runs += way is Execution.UNGRAPHED
        outputs, timed = self.measurements.time(way, run, inputs)
        with trial.lock:
            counts = timed.end is not None and trial.phase is Phase.MEASURING and trial.measures_step()
            if counts and self.measurements.add(way, timed):
                trial.was_measured()
        return outputs

    def run(self, way: Execution, inputs: list[Any]) -> Any:
        """Runs a call without measuring it."""
        return self._run[way](inputs)

    def is_in_its_thread(self) -> bool:
        """Whether the calling thread is the one of the first call."""
        thread = threading.get_ident()
        self._thread = self._thread or thread
        return thread == self._thread

    def is_recorded(self) -> bool:
        return bool(self._log.recordings)

    def is_warmed_up(self) -> bool:
        return self._log.warmups > 0

    def facts(self) -> Facts | None:
        """The facts of its newest recording; None if they are not known."""
        return self.measurements.facts(has_fast_path=self._trial.has_fast_path)

    def part(self) -> Part:
        return self.measurements.part(self.environment.handed())

    def end(self, way: Execution, why: str | None) -> None:
        self.measurements.drop_pending()
        self._log.decided(why, graphed=way is Execution.GRAPHED)
        self.environment.ended(way)


class Trial:
    """A group of functions that are decided together."""

    def __init__(
        self,
        *,
        memory: Kept | None = None,
        rules: Rules = Rules(),  # noqa: B008
        graph: object = None,
        turn: Turn = TURN,
        has_fast_path: bool = True,
    ) -> None:
        """
        Args:
            graph: the graph that started the trial, for callers that ask.
            has_fast_path: whether replays take the fast path.
        """
        self.has_fast_path = has_fast_path
        self._rules, self._memory, self.graph, self._turn = rules, memory, graph, turn
        self.backward: object = None  # the backward graph, for callers that ask
        self._in_flight = 0  # forwards whose backwards are still to come
        self.lock = threading.RLock()  # reentrant: freeing an object under it may call a function
        self._members: list[weakref.ref[TrialMember]] = []
        self._way = Execution.GRAPHED
        self.phase = Phase.RECORDING
        self._first: weakref.ref[TrialMember] | None = None  # the one whose calls begin steps
        self._steps = 0
        self._others = 0  # consecutive steps with other integers
        self._waited = 0  # steps since the measurement began
        self._repeats = 0  # forwards of one step, after the first one
        self._asked: tuple[int, ...] = ()  # integers of the memory's lookup
        self._integers: tuple[int, ...] | None = None  # integers of the measured steps
        self._given: tuple[int, ...] = ()  # this step's
        self._is_disturbed = False  # whether other processes would measure something else
        self._why: str | None = None  # the final way, in numbers
        self.decision: Decision | None = None

    @property
    def is_over(self) -> bool:
        return self.phase is Phase.OVER

    def join(self, member: TrialMember) -> None:
        """Adds a function; one that joins after the end goes the way of the others."""
        with self.lock:
            self._members.append(weakref.ref(member))
            if self.is_over:
                member.end(self._way, self._why)

    @property
    def way(self) -> Execution:
        """The way currently taken."""
        return self._way

    def _alive(self) -> list[TrialMember]:
        return [member for reference in self._members if (member := reference()) is not None]

    def _start_over(self, phase: Phase) -> None:
        self.phase = phase
        self._steps = self._others = self._waited = 0
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
        return self._integers in (None, self._given)

    def was_measured(self) -> None:
        """Notes that a call of this step was measured."""
        self._integers = self._given
        self._is_disturbed |= _is_disturbed()

    def _go_on(self, member: TrialMember, inputs: Sequence[object]) -> None:
        """Begins or continues a step."""
        if not member.is_in_its_thread():
            self._end_undecided(None)
            return
        first = None if self._first is None else self._first()
        if first is None:
            self._first, first = weakref.ref(member), member
            self._asked = _integers(inputs)
            if self._recalls(inputs):
                return
        member.calls += 1
        if member is first:
            self._given = _integers(inputs)
            self._step()
        elif member.calls > _MOST_STEPS + self._repeats:
            self._end_undecided(None)
        if member is next((m for m in self._alive() if m.mode == member.mode), None):  # one partition of each counts
            self._in_flight = max(0, self._in_flight + {"forward": 1, BACKWARD: -1}.get(member.mode, 0))

    def _recalls(self, inputs: Sequence[object]) -> bool:
        """Ends the trial at once if an earlier process decided it."""
        profile = None if self._memory is None else self._memory.find(inputs)
        if profile is not None:
            decision = profile.decision
            self._end(decision.way, decision, f"{decision.text}, as measured {_ago(profile.age_s())}")
        return profile is not None

    def _step(self) -> None:
        members = self._alive()
        if self._is_new_step(members):
            if self.measures_step():
                self._steps += not self._awaits_gpu(members)
                self._others = 0
            else:
                self._others += 1
        for member in members:
            member.calls = 0
            member.measurements.collect()
        if not self._repeats:  # otherwise the way must not change before the backwards were called
            if self.phase is Phase.RECORDING:
                self._look(members)
            if self.phase is Phase.WAITING or self.phase is Phase.MEASURING:
                self._measure(members)
        if not self.is_over and max(self._steps, self._others) > _MOST_STEPS:
            if any(member.is_recorded() or not member.is_warmed_up() for member in members):
                self._end_undecided(None)
            else:  # each call runs un-graphed already, the long way
                self._end(Execution.UNGRAPHED, None, f"{Execution.UNGRAPHED.value}: nothing could be recorded")

    def _is_new_step(self, members: Sequence[TrialMember]) -> bool:
        """Whether the call counts as a step: not while earlier forwards await their backwards.

        Of many consecutive forwards without a backward, one in ``_MOST_STEPS`` counts; of even more, each one.
        """
        backwards = [member for member in members if member.mode == BACKWARD]
        if self._repeats >= _LOST_AFTER and any(member.calls for member in backwards):
            self._in_flight = 0
        is_repeat = bool(backwards) and self._in_flight > 0
        self._repeats = self._repeats + 1 if is_repeat else 0
        return self._repeats % _MOST_STEPS == 0 or self._repeats > _LONGEST_ROW

    def _awaits_gpu(self, members: Sequence[TrialMember]) -> bool:
        """Whether all calls are made, and the GPU has yet to finish some; counts the steps until then."""
        self._waited += 1
        made, rules = _made(members), self._rules
        is_made = sum(made.values()) >= 2 * rules.most_pairs and min(made.values()) >= rules.fewest_pairs
        return self.phase is Phase.MEASURING and is_made and self._waited < _MOST_WAITED

    def _look(self, members: Sequence[TrialMember]) -> None:
        """Decides without a measurement once everything is recorded, if that is possible."""
        if not all(member.is_recorded() for member in members):
            return
        facts = [member.facts() for member in members]
        known = [found for found in facts if found is not None]
        plain = plain_way(known) if len(known) == len(facts) else None
        if plain is not None:
            self._end(plain, None, plain_text(plain, known))
            return
        reasons = [why for member in members if (why := member.environment.why_not_tried()) is not None]
        if reasons:
            self._end_undecided(f"{Execution.GRAPHED.value}: {reasons[0]}")
        else:
            self._start_over(Phase.WAITING)

    def _measure(self, members: Sequence[TrialMember]) -> None:
        """Chooses the way of this step, or decides; waits while another trial measures."""
        if not self._turn.take(self):
            self._wait(members)
            return
        if self.phase is Phase.WAITING:
            self._start_over(Phase.MEASURING)
        made, fewest = _made(members), self._rules.fewest_pairs
        finished = min(member.measurements.finished(way) for member in members for way in Execution)
        compared = compare([member.part() for member in members], self._rules) if finished >= fewest else None
        wanted = next_way(sum(made.values()), self._rules, is_clear=compared is not None and compared.is_clear)
        lacking = min(made, key=lambda way: made[way])  # a step may call a function many times, all of them one way
        if made[lacking] < fewest and (wanted is None or made[wanted] >= fewest):
            wanted = lacking
        if wanted is not None:
            self._way = wanted
        elif compared is not None:  # otherwise the GPU has not caught up
            self._decide(compared)

    def _wait(self, members: Sequence[TrialMember]) -> None:
        """Graphs the calls while another trial measures."""
        if self.phase is Phase.MEASURING:
            self._start_over(Phase.WAITING)
            for member in members:
                member.measurements.start_over()
        self._steps = self._others = 0
        self._way = Execution.GRAPHED

    def leave(self, member: TrialMember) -> None:
        """Takes out a function that goes its own way from now on; the last one ends the trial."""
        with self.lock:
            self._members = [reference for reference in self._members if reference() not in (None, member)]
            if self._first is not None and self._first() is member:
                self._first = None
            if not self._members:
                self._end_undecided(None)

    def give_up(self) -> None:
        """Ends the trial without a decision, for example because calls do not repeat."""
        with self.lock:
            self._end_undecided(None)

    def _end_undecided(self, why: str | None) -> None:
        """Ends the trial graphed."""
        self._end(Execution.GRAPHED, None, why)

    def _decide(self, compared: Comparison) -> None:
        decision = decide(compared)
        is_kept = compared.is_clear and not self._is_disturbed and self._integers == self._asked
        if self._end(decision.way, decision, decision.text) and is_kept and self._memory is not None:
            self._memory.store(decision)

    def _end(self, way: Execution, decision: Decision | None, why: str | None) -> bool:
        """Ends the trial; returns False if it is over already."""
        if self.is_over:
            return False
        self._way, self._why, self.decision, self.phase = way, why, decision, Phase.OVER
        self._first = None
        for member in self._alive():
            member.end(way, why)
        _log.info("%s", why or f"{way.value}: not enough calls could be measured")
        return True


def _made(members: Sequence[TrialMember]) -> dict[Execution, int]:
    """The number of measured calls of each way, of the member with the fewest."""
    return {way: min((member.measurements.made(way) for member in members), default=0) for way in Execution}


def _is_disturbed() -> bool:
    """Whether a profiler or a blocking launch mode slows down each call."""
    return bool(profiler._is_profiler_enabled) or os.environ.get("CUDA_LAUNCH_BLOCKING", "0") not in ("", "0")


def _integers(inputs: Sequence[object]) -> tuple[int, ...]:
    return tuple(value for value in inputs if isinstance(value, int))


def _ago(age_s: float) -> str:
    """``3 days ago``."""
    days = max(0.0, age_s) / 86400
    return "today" if days < 1 else f"{days:.0f} day{'s' if days >= 1.5 else ''} ago"
