"""Decides whether functions are graphed, by rules over plain numbers, without a GPU or a clock.

:func:`plain_way` decides from :class:`Facts` about recordings, if the answer is plain. Otherwise calls are measured in
pairs: :func:`next_way` returns the way of the next call, :func:`compare` the gain of a way in latency and in
throughput, and :func:`decide` the way to take. Too few pairs raise :class:`TooFewPairs`. README.md describes the model.
"""

from __future__ import annotations

import enum
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from pygraph_trees.errors import PygraphError


class TooFewPairs(PygraphError):
    """A comparison was requested before enough calls were measured."""

    template = "A comparison needs {needed} pairs of calls of every part; got {pairs}. Measure as next_way() says."


class Execution(enum.Enum):
    """How a function runs: as a CUDA graph, or as compiled code."""

    GRAPHED = "graphed"
    UNGRAPHED = "un-graphed"

    @property
    def other(self) -> Execution:
        return Execution.UNGRAPHED if self is Execution.GRAPHED else Execution.GRAPHED


class Objective(enum.Enum):
    LATENCY = "latency"  # of a step that the program waits for
    THROUGHPUT = "throughput"  # time of a step among many that it does not wait for


@dataclass(frozen=True, slots=True)
class Load:
    """Part of a step's work, as the model sees it."""

    host_us: float
    gpu_us: float
    launches: int = 1  # pieces in which the host launches the work


@dataclass(frozen=True, slots=True)
class Call:
    """One measured call."""

    host_us: float  # until the call returns
    gpu_us: float  # between an event before and one after the call, without host work: copies included
    from_idle_us: float | None = None  # between the same events, host work included, if the GPU was idle before


@dataclass(frozen=True, slots=True)
class Facts:
    """A recording, as far as the cost of a replay is known without a measurement."""

    launches: int  # kernels, copies and the like
    by_address: int = 0  # live inputs; each may move from call to call
    copied: int = 0  # live inputs
    copied_bytes: int = 0
    has_fast_path: bool = True


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
    """Costs in µs, as measured on an H200; :func:`plain_way` leaves a factor of two for other machines."""

    launch_us: float = 5.0  # host, one kernel of un-graphed code
    replay_us: float = 12.0  # host, a replay on the fast path
    slow_replay_us: float = 80.0  # host, a replay on the slow path
    patch_us: float = 0.9  # host, one parameter of one node
    copy_us: float = 5.1  # host, a replay that copies
    copy_each_us: float = 0.17  # host, each input
    copy_gpu_us: float = 2.5
    copy_gpu_us_per_mb: float = 0.53

    def of_copies(self, copied: int, nbytes: int) -> Load:
        if not copied:
            return Load(0.0, 0.0)
        gpu_us = self.copy_gpu_us + self.copy_gpu_us_per_mb * nbytes / 1e6
        return Load(self.copy_us + self.copy_each_us * copied, gpu_us)

    def of_handed(self, handed: Handed) -> Load:
        copies = self.of_copies(handed.copied, handed.copied_bytes)
        return Load(self.patch_us * handed.patched + copies.host_us, copies.gpu_us)


@dataclass(frozen=True, slots=True)
class Part:
    """A function, measured both ways; the calls of both are in the order in which they were made."""

    ungraphed: Sequence[Call]
    graphed: Sequence[Call]
    launches: int = 1  # of an un-graphed call
    handed: Handed = Handed()
    kernels: int = 0
    copied_bytes: int = 0  # per replay

    @property
    def pairs(self) -> int:
        return min(len(self.ungraphed), len(self.graphed))

    def latencies_us(self, number: int, costs: Costs) -> tuple[float, float] | None:
        """The latencies of a measured pair, un-graphed and graphed; None unless both calls found the GPU idle."""
        ungraphed, graphed = self.ungraphed[number].from_idle_us, self.graphed[number].from_idle_us
        if ungraphed is None or graphed is None:
            return None
        handed = costs.of_handed(self.handed)
        return ungraphed + handed.host_us + handed.gpu_us, graphed

    def loads(self, way: Execution, number: int, costs: Costs) -> list[Load]:
        """The loads of one measured call.

        Between the events of an un-graphed call, the GPU may wait for the host. In a graph it does not, so an
        un-graphed call takes at most the GPU time of its graph.
        """
        if way is Execution.GRAPHED:
            return [Load(self.graphed[number].host_us, self.graphed[number].gpu_us)]
        call, limit_us = self.ungraphed[number], statistics.median(call.gpu_us for call in self.graphed)
        return [Load(call.host_us, min(call.gpu_us, limit_us), self.launches), costs.of_handed(self.handed)]


@dataclass(frozen=True, slots=True)
class Rules:
    margin: float = 0.02  # fraction of the un-graphed step
    floor_us: float = 2.0  # smallest margin; a measured replay takes 1 us more than a later one
    errors: float = 3.0  # standard errors that a difference needs
    fewest_pairs: int = 5
    most_pairs: int = 10


@dataclass(frozen=True, slots=True)
class Gain:
    """How much un-graphed code gains, by one objective."""

    ungraphed_us: float  # median step
    graphed_us: float
    gain_us: float  # median over pairs; negative if graphs are faster
    margin_us: float
    noise_us: float  # as many standard errors as a difference needs
    is_modelled: bool = False  # the steps are computed from host and GPU times, not measured

    @property
    def needed_us(self) -> float:
        return max(self.margin_us, self.noise_us)

    def is_better(self, way: Execution) -> bool:
        """Whether a way is faster, beyond the margin and the noise."""
        return self.of(way) > self.needed_us

    def is_worse(self, way: Execution) -> bool:
        """Whether a way is slower by more than the margin, as far as the median shows."""
        return self.of(way) < -self.margin_us

    def of(self, way: Execution) -> float:
        return self.gain_us if way is Execution.UNGRAPHED else -self.gain_us

    def step_us(self, way: Execution) -> float:
        return self.graphed_us if way is Execution.GRAPHED else self.ungraphed_us

    @property
    def is_clear(self) -> bool:
        """Whether one way is faster for sure, or both are equally fast for sure."""
        return abs(self.gain_us) > self.needed_us or abs(self.gain_us) + self.noise_us < self.margin_us


@dataclass(frozen=True, slots=True)
class Comparison:
    latency: Gain
    throughput: Gain
    pairs: int
    kernels: int
    copied_bytes: int

    def of(self, objective: Objective) -> Gain:
        return self.latency if objective is Objective.LATENCY else self.throughput

    @property
    def is_clear(self) -> bool:
        return self.latency.is_clear and self.throughput.is_clear

    def prefers(self, way: Execution) -> bool:
        """Whether a way is better in latency or in throughput, and worse in neither.

        A modelled latency is no reason for un-graphed code: it is too low if the long kernels come last.
        """
        gains = self.latency, self.throughput
        counts = gains[1:] if self.latency.is_modelled and way is Execution.UNGRAPHED else gains
        return any(gain.is_better(way) for gain in counts) and not any(gain.is_worse(way) for gain in gains)


@dataclass(frozen=True, slots=True)
class Decision:
    way: Execution
    compared: Comparison  # the last measurement

    @property
    def objective(self) -> Objective:
        """The objective that decided: latency, unless only throughput differs."""
        found = self.compared
        counts = not found.latency.is_modelled or self.way is Execution.GRAPHED
        by_latency = counts and found.latency.is_better(self.way)
        return Objective.THROUGHPUT if found.throughput.is_better(self.way) and not by_latency else Objective.LATENCY

    @property
    def text(self) -> str:
        """One line: ``un-graphed: 41 us a call against 58 us (2 kernels, 25 MB copied)``."""
        found, gain = self.compared, self.compared.of(self.objective)
        notes = [_kernels(found.kernels)]
        if found.copied_bytes:
            notes.append(f"{_megabytes(found.copied_bytes)} copied")
        if self.objective is Objective.THROUGHPUT:
            notes.append("without waiting")
        if not gain.is_better(self.way):
            notes.append(f"margin {gain.needed_us:.3g} us")
        ours, other = gain.step_us(self.way), gain.step_us(self.way.other)
        return f"{self.way.value}: {_us(ours)} a call against {_us(other)} ({', '.join(notes)})"


def plain_way(parts: Sequence[Facts], costs: Costs = Costs(), rules: Rules = Rules()) -> Execution | None:
    """The way of functions that are decided together, if their facts leave no doubt; None if calls must be measured.

    Un-graphed code launches each kernel; a replay copies and sets addresses instead. A way is plain if its work is at
    most half of the other's. While the GPU computes, launches cost nothing, but what a replay does before its launch
    does; so that must be within the margin too.
    """
    launches_us = sum(costs.launch_us * part.launches for part in parts)
    replays_us = before_us = gpu_us = 0.0
    for part in parts:
        copies = costs.of_copies(part.copied, part.copied_bytes)
        replays_us += costs.replay_us if part.has_fast_path else costs.slow_replay_us
        before_us += costs.patch_us * part.by_address + copies.host_us
        gpu_us += copies.gpu_us
    work_us = replays_us + before_us + gpu_us
    if launches_us >= 2 * work_us and before_us + gpu_us <= rules.margin * launches_us:
        return Execution.GRAPHED
    return Execution.UNGRAPHED if gpu_us >= 2 * launches_us else None


def plain_text(way: Execution, parts: Sequence[Facts]) -> str:
    """One line: ``graphed: 12 launches in one replay, without a measurement``."""
    launches = sum(part.launches for part in parts)
    copied_bytes = sum(part.copied_bytes for part in parts)
    copied = f", {_megabytes(copied_bytes)} copied" if copied_bytes else ""
    replays = "one replay" if len(parts) == 1 else f"{len(parts)} replays"
    return f"{way.value}: {launches} launch{'' if launches == 1 else 'es'} in {replays}{copied}, without a measurement"


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


def compare(parts: Sequence[Part], rules: Rules = Rules(), costs: Costs = Costs()) -> Comparison:
    """Compares the steps of measured parts. All parts go the same way.

    Raises:
        TooFewPairs: a part has fewer measured pairs than the rules require.
    """
    pairs = min((part.pairs for part in parts), default=0)
    if pairs < rules.fewest_pairs:
        raise TooFewPairs(needed=rules.fewest_pairs, pairs=pairs)
    latency, throughput = (_gain(parts, pairs, objective, rules, costs) for objective in Objective)
    kernels, copied_bytes = (sum(found) for found in zip(*((p.kernels, p.copied_bytes) for p in parts), strict=True))
    return Comparison(latency, throughput, pairs, kernels, copied_bytes)


def _gain(parts: Sequence[Part], pairs: int, objective: Objective, rules: Rules, costs: Costs) -> Gain:
    measured = []
    if objective is Objective.LATENCY and len(parts) == 1:
        measured = [found for number in range(pairs) if (found := parts[0].latencies_us(number, costs)) is not None]
    is_modelled = len(measured) < rules.fewest_pairs
    steps = [_steps_us(parts, number, objective, costs) for number in range(pairs)] if is_modelled else measured
    ungraphed, graphed = zip(*steps, strict=True)
    gains = [other - one for one, other in steps]
    gain_us, ungraphed_us = statistics.median(gains), statistics.median(ungraphed)
    margin_us, noise_us = max(rules.floor_us, rules.margin * ungraphed_us), rules.errors * _standard_error(gains)
    is_modelled &= objective is Objective.LATENCY  # throughput follows from the measured times
    return Gain(ungraphed_us, statistics.median(graphed), gain_us, margin_us, noise_us, is_modelled)


def _steps_us(parts: Sequence[Part], number: int, objective: Objective, costs: Costs) -> tuple[float, float]:
    """The times of a step un-graphed and graphed, computed from one measured pair of each part."""
    ungraphed, graphed = (
        step_us([load for part in parts for load in part.loads(way, number, costs)], objective)
        for way in (Execution.UNGRAPHED, Execution.GRAPHED)
    )
    return ungraphed, graphed


def decide(compared: Comparison) -> Decision:
    """The decision after a measurement: graphed, unless un-graphed code is better."""
    return Decision(Execution.UNGRAPHED if compared.prefers(Execution.UNGRAPHED) else Execution.GRAPHED, compared)


def next_way(made: int, rules: Rules = Rules(), *, is_clear: bool = False) -> Execution | None:
    """The way of the next measured call after ``made`` ones; None if nothing is left to measure.

    Within four calls, both ways have the same mean position, so a steady change of the load favours neither.
    """
    fewest, most = 2 * rules.fewest_pairs, 2 * rules.most_pairs
    if made >= most or (is_clear and made >= fewest and made % 2 == 0):
        return None
    return Execution.GRAPHED if made % 4 in (0, 3) else Execution.UNGRAPHED


def _standard_error(values: Sequence[float]) -> float:
    """The standard error of the median, from the median absolute deviation, which ignores a single outlier."""
    middle = statistics.median(values)
    deviation = 1.4826 * statistics.median(abs(value - middle) for value in values)
    return 1.2533 * deviation / math.sqrt(len(values))


def _kernels(count: int) -> str:
    return f"{count} kernel{'' if count == 1 else 's'}"


def _us(time_us: float) -> str:
    return f"{time_us:.1f} us" if time_us < 9.95 else f"{time_us:.0f} us"


def _megabytes(nbytes: int) -> str:
    size = nbytes / 1e6
    return "under 0.1 MB" if size < 0.1 else f"{size:.1f} MB" if size < 9.95 else f"{size:.0f} MB"
