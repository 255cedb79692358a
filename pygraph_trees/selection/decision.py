"""Decides whether a function is graphed, by rules over plain facts, without a GPU or a clock.

The inputs are a function's :class:`Timings` each way, the effect on its neighbours (:class:`Handed`), and whether the
program waits for each step (:class:`Objective`). :func:`compare` returns the step's time both ways, :func:`decide` the
way to take, :func:`next_way` what to measure next. Too few calls raise :class:`TooFewCalls`. README.md describes the
model.
"""

from __future__ import annotations

import enum
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from pygraph_trees.errors import PygraphError


class TooFewCalls(PygraphError):
    """A decision was requested before enough calls were measured."""

    template = (
        "A comparison needs {needed} calls each way of every part; got {ungraphed} un-graphed and {graphed} graphed. "
        "Measure as next_way() says, until it returns None."
    )


class Execution(enum.Enum):
    """How a function runs: as a CUDA graph, or as compiled code."""

    GRAPHED = "graphed"
    UNGRAPHED = "un-graphed"

    @property
    def other(self) -> Execution:
        return Execution.UNGRAPHED if self is Execution.GRAPHED else Execution.GRAPHED


class Objective(enum.Enum):
    LATENCY = "latency"
    THROUGHPUT = "throughput"


@dataclass(frozen=True, slots=True)
class Load:
    """Part of a step's work, as the model sees it."""

    host_us: float
    gpu_us: float
    launches: int = 1  # pieces in which the host launches the work


@dataclass(frozen=True, slots=True)
class Timings:
    """The measurements of a function run one way."""

    host_us: float  # median over the calls, until the call returns
    gpu_us: float  # median over the calls, between an event before and one after the call: copies included
    launches: int  # kernels and copies of an un-graphed call, 1 for a replay
    calls: int
    spread_us: float  # interquartile range of the calls, host plus GPU

    @staticmethod
    def of(host_us: Sequence[float], gpu_us: Sequence[float], launches: int) -> Timings:
        """The timings of single calls, at least one."""
        spread_us = _middle_half(host_us) + _middle_half(gpu_us)
        return Timings(statistics.median(host_us), statistics.median(gpu_us), launches, len(host_us), spread_us)

    def without_waits(self, kernels_us: float) -> Timings:
        """The un-graphed timings, corrected by the time that the same kernels take in a graph, without copies.

        Between the events of an un-graphed call the GPU may wait for the host; within a graph it does not.
        """
        return replace(self, gpu_us=min(self.gpu_us, kernels_us))

    @property
    def load(self) -> Load:
        return Load(self.host_us, self.gpu_us, self.launches)

    @property
    def error_us(self) -> float:
        """Approximately the standard error of the medians."""
        return self.spread_us / math.sqrt(self.calls)


@dataclass(frozen=True, slots=True)
class Handed:
    """The extra work of graphed functions downstream at each replay, if this function is un-graphed.

    Its outputs are in the graph pool while it is graphed. Un-graphed, each output is a live input of the functions that
    read it. Their replays belong among the loads after it: their host work costs nothing while the GPU is still busy.
    """

    patched: int = 0  # node parameters to set for outputs given by address
    copied: int = 0  # inputs
    copied_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Costs:
    """The costs of those parts of a replay that cannot be measured separately; the defaults are an H200's."""

    patch_us: float = 0.9  # host, one parameter of one node
    copy_us: float = 5.1  # host, a replay that copies
    copy_each_us: float = 0.17  # host, each input
    copy_gpu_us: float = 2.5
    copy_gpu_us_per_mb: float = 0.53

    def of(self, handed: Handed) -> Load:
        host_us, gpu_us = self.patch_us * handed.patched, 0.0
        if handed.copied:
            host_us += self.copy_us + self.copy_each_us * handed.copied
            gpu_us = self.copy_gpu_us + self.copy_gpu_us_per_mb * handed.copied_bytes / 1e6
        return Load(host_us, gpu_us)


@dataclass(frozen=True, slots=True)
class Part:
    """A function, measured both ways."""

    ungraphed: Timings
    graphed: Timings
    handed: Handed = Handed()
    kernels: int = 0
    copied_bytes: int = 0  # per replay

    def timings(self, way: Execution) -> Timings:
        return self.graphed if way is Execution.GRAPHED else self.ungraphed


@dataclass(frozen=True, slots=True)
class Restless:
    """A function whose graphed calls may all be recordings."""

    ungraphed_us: Sequence[float]  # host time of each call
    graphed_us: Sequence[float]  # host time of each call, replay or not
    replays: int


@dataclass(frozen=True, slots=True)
class Rules:
    margin: float = 0.03  # fraction of the parts' own un-graphed time
    floor_us: float = 2.0  # smallest margin
    flips_after: int = 3  # consecutive measurements against a decision that change it
    fewest_calls: int = 5  # each way
    most_calls: int = 20  # both ways together
    fewest_recorded: int = 20  # after so many graphed calls with few replays, no more replays are expected


@dataclass(frozen=True, slots=True)
class Comparison:
    """One measurement: the step's time both ways, and the facts compared."""

    objective: Objective
    ungraphed_us: float
    graphed_us: float
    margin_us: float
    calls: int  # measured calls, both ways together, of the part with the fewest
    kernels: int
    copied_bytes: int

    def step_us(self, way: Execution) -> float:
        return self.graphed_us if way is Execution.GRAPHED else self.ungraphed_us

    def gain_us(self, way: Execution) -> float:
        """How much faster this way is than the other."""
        return self.step_us(way.other) - self.step_us(way)

    @property
    def clear(self) -> bool:
        return abs(self.gain_us(Execution.UNGRAPHED)) > self.margin_us


@dataclass(frozen=True, slots=True)
class Decision:
    way: Execution
    compared: Comparison  # the last measurement
    against: int = 0  # consecutive measurements that contradict it, up to the last one

    @property
    def text(self) -> str:
        """One line: ``un-graphed: 41 us a call against 58 us (2 kernels, 25 MB copied)``."""
        found = self.compared
        notes = [f"{found.kernels} kernel{'' if found.kernels == 1 else 's'}"]
        if found.copied_bytes:
            notes.append(f"{_megabytes(found.copied_bytes)} copied")
        if self.against:
            notes.append(f"not yet changed: {self.against} in a row speak against it")
        elif not found.clear:
            notes.append(f"margin {found.margin_us:.3g} us")
        ours, other = found.step_us(self.way), found.step_us(self.way.other)
        return f"{self.way.value}: {_us(ours)} a call against {_us(other)} ({', '.join(notes)})"


def step_us(loads: Sequence[Load], objective: Objective) -> float:
    """The time of a step with these loads, in order: from idle to idle, or per step without a wait in between."""
    if objective is Objective.THROUGHPUT:
        return max(sum(load.host_us for load in loads), sum(load.gpu_us for load in loads))
    host_us = gpu_us = 0.0  # times at which each is free
    for load in loads:
        pieces = max(1, load.launches)
        first, last = load.host_us / pieces + load.gpu_us, load.host_us + load.gpu_us / pieces
        gpu_us = max(gpu_us + load.gpu_us, host_us + max(first, last))
        host_us += load.host_us
    return max(host_us, gpu_us)


def compare(
    parts: Sequence[Part | Load], objective: Objective, rules: Rules = Rules(), costs: Costs = Costs()
) -> Comparison:
    """Compares the step both ways. All parts go the same way; a load is other work of the step, the same either way.

    Raises:
        TooFewCalls: a part has fewer measured calls, either way, than the rules require.
    """
    deciding = [part for part in parts if isinstance(part, Part)]
    for part in deciding:
        if min(part.ungraphed.calls, part.graphed.calls) < rules.fewest_calls:
            raise TooFewCalls(needed=rules.fewest_calls, ungraphed=part.ungraphed.calls, graphed=part.graphed.calls)
    ungraphed_us, graphed_us = (
        step_us(_loads(parts, way, costs), objective) for way in (Execution.UNGRAPHED, Execution.GRAPHED)
    )
    error_us = math.hypot(*(part.timings(way).error_us for part in deciding for way in Execution))
    # The margin depends on the un-graphed time alone. If it depended on the slower way, a slower replay that other work
    # hides, and that so changes nothing in the step, would raise the margin and favour graphs.
    own_us = step_us([part.ungraphed.load for part in deciding], objective)
    return Comparison(
        objective,
        ungraphed_us,
        graphed_us,
        max(rules.floor_us, rules.margin * own_us) + error_us,
        min((part.ungraphed.calls + part.graphed.calls for part in deciding), default=0),
        sum(part.kernels for part in deciding),
        sum(part.copied_bytes for part in deciding),
    )


def decide(compared: Comparison, standing: Decision | None = None, rules: Rules = Rules()) -> Decision:
    """The decision after one more measurement; ``standing`` is the previous decision, if any."""
    if standing is None:
        better = compared.gain_us(Execution.UNGRAPHED) > compared.margin_us
        return Decision(Execution.UNGRAPHED if better else Execution.GRAPHED, compared)
    if compared.gain_us(standing.way.other) <= 2 * compared.margin_us:
        return Decision(standing.way, compared)
    if standing.against + 1 >= rules.flips_after:
        return Decision(standing.way.other, compared)
    return Decision(standing.way, compared, standing.against + 1)


def why_never_graphed(parts: Sequence[Restless], rules: Rules = Rules()) -> str | None:
    """Says why functions that could not be compared are not graphed; None if they are."""
    few = min((part.replays for part in parts), default=rules.fewest_calls)
    calls = min((len(part.graphed_us) for part in parts), default=0)
    measured = min((len(part.ungraphed_us) for part in parts), default=0)
    if few >= rules.fewest_calls or calls < rules.fewest_recorded or measured < rules.fewest_calls:
        return None
    ungraphed_us = sum(statistics.median(part.ungraphed_us) for part in parts)
    graphed_us = sum(statistics.median(part.graphed_us) for part in parts)
    if graphed_us - ungraphed_us <= 2 * max(rules.floor_us, rules.margin * ungraphed_us):
        return None
    way, ours, other = Execution.UNGRAPHED.value, _us(ungraphed_us), _us(graphed_us)
    return f"{way}: the host takes {ours} a call against {other}, and {few} of {calls} graphed calls were replays"


def next_way(ungraphed_calls: int, graphed_calls: int, clear: bool = False, rules: Rules = Rules()) -> Execution | None:
    """The way to measure the next call; None if nothing is left to measure.

    Un-graphed calls come first, before the function is recorded: later ones would take its outputs out of the graph
    pool, and functions downstream would record again. If the comparison is not ``clear``, more replays are measured.
    """
    if ungraphed_calls < rules.fewest_calls:
        return Execution.UNGRAPHED
    if graphed_calls < rules.fewest_calls:
        return Execution.GRAPHED
    return None if clear or ungraphed_calls + graphed_calls >= rules.most_calls else Execution.GRAPHED


def _loads(parts: Sequence[Part | Load], way: Execution, costs: Costs) -> list[Load]:
    loads = []
    for part in parts:
        if isinstance(part, Load):
            loads.append(part)
            continue
        loads.append(part.timings(way).load)
        if way is Execution.UNGRAPHED:
            loads.append(costs.of(part.handed))
    return loads


def _middle_half(values: Sequence[float]) -> float:
    """The interquartile range; for fewer than four values, the full range."""
    ordered = sorted(values)
    left_out = len(ordered) // 4
    return ordered[-1 - left_out] - ordered[left_out]


def _us(time_us: float) -> str:
    return f"{time_us:.1f} us" if time_us < 9.95 else f"{time_us:.0f} us"


def _megabytes(nbytes: int) -> str:
    size = nbytes / 1e6
    return "under 0.1 MB" if size < 0.1 else f"{size:.1f} MB" if size < 9.95 else f"{size:.0f} MB"
