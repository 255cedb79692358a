"""Decides whether functions are graphed, by rules over plain numbers; README.md describes the model."""

from __future__ import annotations

import enum
import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

# Costs in us, as measured on an H200.
_CALL_US = 6.0  # host, the code around the kernels of an un-graphed call; on a slow host 19
_LAUNCH_US = 5.0  # host, one kernel of un-graphed code
_REPLAY_US = 12.0  # host, a replay on the fast path
_SLOW_REPLAY_US = 80.0  # host, a replay on the slow path
_PATCH_US = 0.9  # host, one parameter of one node
_COPY_US = 5.1  # host, a replay that copies
_COPY_EACH_US = 0.17  # host, each input
_COPY_GPU_US = 2.5
_COPY_GPU_US_PER_MB = 0.53

_ADDRESSES = 0.2  # of the time of the launches
_SLOW_HOST = 2.0  # how much longer an un-graphed call may take on a slow host
_MARGIN = 0.02  # fraction of the un-graphed step
_FLOOR_US = 2.0  # smallest margin; a measured replay takes 1 us more than a later one
_ERRORS = 3.0  # standard errors that a difference needs
FEWEST_PAIRS = 5
MOST_PAIRS = 10


class Execution(enum.Enum):
    """How a function runs: as a CUDA graph, or as compiled code."""

    GRAPHED = "graphed"
    UNGRAPHED = "un-graphed"

    def plain_text(self, parts: Sequence[Facts]) -> str:
        """One line: ``graphed: 12 launches in one replay, without a measurement``."""
        return f"{self.value}: {_work(parts)}, without a measurement"


@dataclass(frozen=True, slots=True)
class Call:
    """One call, measured or as the model sees it."""

    host_us: float  # until the call returns
    gpu_us: float  # between an event before and one after the call, without host work: copies included
    from_idle_us: float | None = None  # between the same events, host work included, if the GPU was idle before
    launches: int = 1  # pieces in which the host launches the work, for the model


@dataclass(frozen=True, slots=True)
class Facts:
    """A recording, as far as the cost of a replay is known without a measurement."""

    launches: int | None  # kernels, copies and the like; None if the nodes are not known
    by_address: int = 0  # live inputs; each may move from call to call
    copied: int = 0  # live inputs
    copied_bytes: int = 0
    has_fast_path: bool = True


@dataclass(frozen=True, slots=True)
class Part:
    """A function, measured both ways; the calls of both are in the order in which they were made."""

    ungraphed: Sequence[Call]
    graphed: Sequence[Call]
    facts: Facts
    handed: int = 0  # outputs whose addresses graphed functions downstream set if this one is un-graphed

    def latencies_us(self, number: int) -> tuple[float, float] | None:
        """The latencies of a measured pair, un-graphed and graphed; None unless both calls found the GPU idle."""
        ungraphed, graphed = self.ungraphed[number].from_idle_us, self.graphed[number].from_idle_us
        return None if ungraphed is None or graphed is None else (ungraphed + _PATCH_US * self.handed, graphed)

    def modelled(self, number: int) -> tuple[list[Call], list[Call]]:
        """A measured pair as the model sees it, un-graphed and graphed."""
        ungraphed, graphed = self.ungraphed[number], self.graphed[number]
        # Between the events of an un-graphed call, the GPU may wait for the host; in a graph it does not.
        gpu_us = min(ungraphed.gpu_us, statistics.median(call.gpu_us for call in self.graphed))
        own = Call(ungraphed.host_us, gpu_us, launches=max(1, self.facts.launches or 0))
        return [own, Call(_PATCH_US * self.handed, 0.0)], [graphed]


@dataclass(frozen=True, slots=True)
class Gain:
    """How much un-graphed code gains in a step."""

    ungraphed_us: float  # median step
    graphed_us: float
    gain_us: float  # median over pairs; negative if graphs are faster
    margin_us: float
    noise_us: float  # as many standard errors as a difference needs

    @property
    def needed_us(self) -> float:
        return max(self.margin_us, self.noise_us)

    def is_better(self, way: Execution) -> bool:
        """Whether a way is faster, beyond the margin and the noise."""
        return (self.gain_us if way is Execution.UNGRAPHED else -self.gain_us) > self.needed_us

    @property
    def is_clear(self) -> bool:
        """Whether one way is faster for sure, or both are equally fast for sure."""
        return abs(self.gain_us) > self.needed_us or abs(self.gain_us) + self.noise_us < self.margin_us


@dataclass(frozen=True, slots=True)
class Comparison:
    latency: Gain  # of a step that the program waits for
    throughput: Gain  # of a step among many that it does not wait for
    facts: Sequence[Facts]  # of its functions
    is_modelled: bool = False  # the latencies are computed from host and GPU times, not measured

    def reasons(self, way: Execution) -> list[Gain]:
        """The gains that speak for a way."""
        # A modelled latency is no reason for un-graphed code: it is too low if the long kernels come last.
        is_latency_left_out = self.is_modelled and way is Execution.UNGRAPHED
        gains = [self.throughput] if is_latency_left_out else [self.latency, self.throughput]
        return [gain for gain in gains if gain.is_better(way)]

    @property
    def is_clear(self) -> bool:
        return self.latency.is_clear and self.throughput.is_clear

    def text(self, way: Execution) -> str:
        """One line: ``un-graphed: 41 us a call against 58 us (2 launches in one replay, 25 MB copied)``."""
        gain = next(iter(self.reasons(way)), self.latency)
        waiting = "" if gain is self.latency else ", without waiting"
        margin = "" if gain.is_better(way) else f", margin {gain.needed_us:.3g} us"
        times = [_rounded(gain.graphed_us), _rounded(gain.ungraphed_us)]
        ours, other = times if way is Execution.GRAPHED else times[::-1]
        return f"{way.value}: {ours} us a call against {other} us ({_work(self.facts)}{waiting}{margin})"


def plain_way(parts: Sequence[Facts]) -> Execution | None:
    """The way of functions that are decided together, if their facts leave no doubt; None if calls must be measured."""
    # README.md has the rules. While the GPU computes, launches cost nothing; what a replay does before its launch does.
    launches_us = replays_us = before_us = gpu_us = 0.0
    for part in parts:
        if part.launches is None:
            return None
        launches_us += _CALL_US + _LAUNCH_US * part.launches
        replays_us += _REPLAY_US if part.has_fast_path else _SLOW_REPLAY_US
        before_us += _PATCH_US * part.by_address
        if part.copied:
            before_us += _COPY_US + _COPY_EACH_US * part.copied
            gpu_us += _COPY_GPU_US + _COPY_GPU_US_PER_MB * part.copied_bytes / 1e6
    work_us = replays_us + before_us + gpu_us
    if not any(part.copied or not part.has_fast_path for part in parts):
        is_graphed = launches_us > work_us and before_us <= _ADDRESSES * launches_us
    else:
        is_graphed = launches_us >= 2 * work_us and before_us + gpu_us <= _MARGIN * launches_us
    if is_graphed:
        return Execution.GRAPHED
    return Execution.UNGRAPHED if gpu_us >= 2 * _SLOW_HOST * launches_us else None


def latency_us(calls: Sequence[Call]) -> float:
    """The time of a step with these calls, in order, from idle to idle."""
    host_us = gpu_us = 0.0  # times at which each is free
    for call in calls:
        first, last = call.host_us / call.launches + call.gpu_us, call.host_us + call.gpu_us / call.launches
        gpu_us = max(gpu_us + call.gpu_us, host_us + max(first, last))
        host_us += call.host_us
    return max(host_us, gpu_us)


def throughput_us(calls: Sequence[Call]) -> float:
    """The time of a step with these calls among many, without a wait in between."""
    return max(sum(call.host_us for call in calls), sum(call.gpu_us for call in calls))


def compare(parts: Sequence[Part]) -> Comparison:
    """Compares graphed with un-graphed steps of parts that change together, each with a measured call each way."""
    pairs = range(min(len(calls) for part in parts for calls in (part.ungraphed, part.graphed)))
    by_part = [zip(*(part.modelled(number) for part in parts), strict=True) for number in pairs]
    steps = [[list(itertools.chain(*calls)) for calls in ways] for ways in by_part]
    latencies = [parts[0].latencies_us(number) for number in pairs] if len(parts) == 1 else []
    measured = [found for found in latencies if found is not None]
    is_modelled = len(measured) < FEWEST_PAIRS
    if is_modelled:
        measured = [(latency_us(ungraphed), latency_us(graphed)) for ungraphed, graphed in steps]
    throughput = _gain([(throughput_us(ungraphed), throughput_us(graphed)) for ungraphed, graphed in steps])
    return Comparison(_gain(measured), throughput, [part.facts for part in parts], is_modelled)


def _gain(steps: Sequence[tuple[float, float]]) -> Gain:
    """The gain in pairs of steps, un-graphed and graphed."""
    gains = [graphed - ungraphed for ungraphed, graphed in steps]
    ungraphed_us, graphed_us, gain_us = map(statistics.median, (*zip(*steps, strict=True), gains))
    # The standard error of the median, from the median absolute deviation, which ignores a single outlier.
    deviation_us = 1.4826 * statistics.median(abs(gain - gain_us) for gain in gains)
    error_us = 1.2533 * deviation_us / math.sqrt(len(gains))
    return Gain(ungraphed_us, graphed_us, gain_us, max(_FLOOR_US, _MARGIN * ungraphed_us), _ERRORS * error_us)


def decide(compared: Comparison) -> Execution:
    """Graphed, unless un-graphed code is better in latency or throughput, and worse in neither."""
    is_worse = any(gain.gain_us < -gain.margin_us for gain in (compared.latency, compared.throughput))
    return Execution.UNGRAPHED if compared.reasons(Execution.UNGRAPHED) and not is_worse else Execution.GRAPHED


def next_way(made: Mapping[Execution, int], *, is_clear: bool = False) -> Execution | None:
    """The way of the next call, after some measured calls of each way; None if nothing is left to measure."""
    total, lacking = sum(made.values()), min(made, key=lambda way: made[way])
    # Within four calls, both ways have the same mean position, so a steady change of the load favours neither.
    wanted = Execution.GRAPHED if total % 4 in (0, 3) else Execution.UNGRAPHED
    is_enough = total >= 2 * MOST_PAIRS or (is_clear and total >= 2 * FEWEST_PAIRS and total % 2 == 0)
    # A step may call a function many times, all of them one way; then the other follows until it has the fewest pairs.
    if made[lacking] < FEWEST_PAIRS and (is_enough or made[wanted] >= FEWEST_PAIRS):
        return lacking
    return None if is_enough else wanted


def _work(parts: Sequence[Facts]) -> str:
    """``2 launches in one replay, 25 MB copied``."""
    launches, megabytes = sum(part.launches or 0 for part in parts), sum(part.copied_bytes for part in parts) / 1e6
    replays = "one replay" if len(parts) == 1 else f"{len(parts)} replays"
    size = "under 0.1" if megabytes < 0.1 else _rounded(megabytes)
    copied = f", {size} MB copied" if megabytes else ""
    return f"{launches} launch{'' if launches == 1 else 'es'} in {replays}{copied}"


def _rounded(value: float) -> str:
    return f"{value:.1f}" if value < 9.95 else f"{value:.0f}"
