"""Whether a function is graphed: rules over plain facts, which ask no GPU and no clock.

In go what was measured of a function run both ways (:class:`Sample`), what un-graphing it does to its neighbours
(:class:`Handed`) and whether the program waits for each of its steps (:class:`Objective`); out come the step's time
both ways (:func:`compare`) and the way to take (:func:`decide`). A function and its backward are *parts* of one
decision, given in the order in which they run. :func:`next_way` says which way the next call is to be measured, if any.

The model. A call is work of the host that launches work of the GPU, in ``launches`` pieces of one size, one after
another: the GPU begins a piece when the host has launched it and the piece before is done. Un-graphed each kernel is a
piece; a replay is one piece, as its copies and its graph come at the end of what the host does.

- *latency*: the program waits for the GPU after each step. A call from idle takes ``max(host, gpu) + min(host, gpu) /
  launches``: host and GPU overlap but for the first launch or the last kernel. With one launch that is their sum. For
  several parts the host goes on to the next one while the GPU works, so the GPU's time hides what the host does later.
- *throughput*: the host runs ahead without end, and a step takes as long as the busier of the two: the greater one of
  the sum of the host's times and the sum of the GPU's. What else a step does can decide which one that is, and is given
  as a :class:`Load` among the parts; graphs that save host time gain nothing where the GPU is what is waited for.

Graphed is the default: un-graphed has to be better by a margin, which grows with the function's own time and with the
spread of what was measured. A decision that stands changes when the other way is better by twice the margin in several
measurements one after another; noise within the margin around any steady difference can so change it once at most.

A function may never be replayed: sizes change with each call, and it is recorded again and again. Then there is nothing
to compare but what the host does for a recording, which ends before the GPU begins, and un-graphed has to be better by
twice the margin (:func:`why_never_graphed`).

What does not work, and why: the time between two events as the GPU's time of an un-graphed call. Where the GPU is idle
when the call begins, it waits for the host in between, and the host's time would count twice
(:meth:`Sample.without_waits`).
"""

from __future__ import annotations

import enum
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from pygraph_trees.errors import PygraphError


class TooFewCalls(PygraphError):
    """A decision was asked for before enough calls were measured."""

    template = (
        "A comparison needs {needed} calls each way of every part; got {ungraphed} un-graphed and {graphed} graphed. "
        "Measure as next_way() says, until it returns None."
    )


class Way(enum.Enum):
    GRAPHED = "graphed"
    UNGRAPHED = "un-graphed"

    @property
    def other(self) -> Way:
        return Way.UNGRAPHED if self is Way.GRAPHED else Way.GRAPHED


class Objective(enum.Enum):
    LATENCY = "latency"
    THROUGHPUT = "throughput"


@dataclass(frozen=True, slots=True)
class Load:
    """Work of a step, as the model sees it."""

    host_us: float
    gpu_us: float
    launches: int = 1  # pieces in which the host hands it to the GPU


@dataclass(frozen=True, slots=True)
class Sample:
    """What was measured of a function run one way."""

    host_us: float  # median over the calls, until the call returned
    gpu_us: float  # median over the calls, between an event before and one after it: copies are in it
    launches: int  # kernels and copies of an un-graphed call, 1 for a replay
    calls: int
    spread_us: float  # how far apart the middle half of the calls lie, host and GPU together

    @staticmethod
    def of(host_us: Sequence[float], gpu_us: Sequence[float], launches: int) -> Sample:
        """Of single calls, at least one."""
        spread_us = _middle_half(host_us) + _middle_half(gpu_us)
        return Sample(statistics.median(host_us), statistics.median(gpu_us), launches, len(host_us), spread_us)

    def without_waits(self, kernels_us: float) -> Sample:
        """The un-graphed sample, given the time that the same kernels take in a graph, copies left out.

        Between an un-graphed call's events the GPU may have waited for the host; within a graph it waits for nothing.
        """
        return replace(self, gpu_us=min(self.gpu_us, kernels_us))

    @property
    def load(self) -> Load:
        return Load(self.host_us, self.gpu_us, self.launches)

    @property
    def error_us(self) -> float:
        """About the standard error of the medians."""
        return self.spread_us / math.sqrt(self.calls)


@dataclass(frozen=True, slots=True)
class Handed:
    """What graphed functions downstream do at each replay only because this one is un-graphed.

    Its outputs lie in the graph pool while it is graphed; un-graphed, each is a live input of those that read it. Their
    replays should be among the loads after it: what the host does for them costs nothing where the GPU is still busy.
    """

    patched: int = 0  # node parameters to set, where it is given by address
    copied: int = 0  # inputs
    copied_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Costs:
    """What the parts of a replay cost where they cannot be measured by themselves; the defaults are an H200's."""

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

    ungraphed: Sample
    graphed: Sample
    handed: Handed = Handed()
    kernels: int = 0
    copied_bytes: int = 0  # by each replay

    def sample(self, way: Way) -> Sample:
        return self.graphed if way is Way.GRAPHED else self.ungraphed


@dataclass(frozen=True, slots=True)
class Restless:
    """A function whose graphed calls may all be recordings."""

    ungraphed_us: Sequence[float]  # the host's time, of each call
    graphed_us: Sequence[float]  # of each call, replay or not
    replays: int


@dataclass(frozen=True, slots=True)
class Rules:
    margin: float = 0.03  # of the parts' own time, un-graphed
    floor_us: float = 2.0  # least margin
    flips_after: int = 3  # measurements one after another that have to speak against a decision
    fewest_calls: int = 5  # each way
    most_calls: int = 20  # both ways together
    fewest_recorded: int = 20  # graphed calls, hardly one of them a replay, that tell that there will be none


@dataclass(frozen=True, slots=True)
class Comparison:
    """One measurement: the step both ways, and what was compared."""

    objective: Objective
    ungraphed_us: float
    graphed_us: float
    margin_us: float
    calls: int  # measured, both ways together, of the part with the fewest
    kernels: int
    copied_bytes: int

    def step_us(self, way: Way) -> float:
        return self.graphed_us if way is Way.GRAPHED else self.ungraphed_us

    def gain_us(self, way: Way) -> float:
        """By how much this way is better than the other."""
        return self.step_us(way.other) - self.step_us(way)

    @property
    def clear(self) -> bool:
        return abs(self.gain_us(Way.UNGRAPHED)) > self.margin_us


@dataclass(frozen=True, slots=True)
class Decision:
    way: Way
    compared: Comparison  # the last measurement
    against: int = 0  # measurements up to the last one that spoke against it, one after another

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
    """The time of a step that consists of these, one after another, from idle to idle or without a wait between."""
    if objective is Objective.THROUGHPUT:
        return max(sum(load.host_us for load in loads), sum(load.gpu_us for load in loads))
    host_us = gpu_us = 0.0  # until when each is busy
    for load in loads:
        pieces = max(1, load.launches)
        first, last = load.host_us / pieces + load.gpu_us, load.host_us + load.gpu_us / pieces
        gpu_us = max(gpu_us + load.gpu_us, host_us + max(first, last))
        host_us += load.host_us
    return max(host_us, gpu_us)


def compare(
    parts: Sequence[Part | Load], objective: Objective, rules: Rules = Rules(), costs: Costs = Costs()
) -> Comparison:
    """The step both ways. All parts go the same way; a load is what else the step does, and is the same either way.

    Raises:
        TooFewCalls: a part was measured less often than the rules ask for, either way.
    """
    deciding = [part for part in parts if isinstance(part, Part)]
    for part in deciding:
        if min(part.ungraphed.calls, part.graphed.calls) < rules.fewest_calls:
            raise TooFewCalls(needed=rules.fewest_calls, ungraphed=part.ungraphed.calls, graphed=part.graphed.calls)
    ungraphed_us, graphed_us = (step_us(_loads(parts, way, costs), objective) for way in (Way.UNGRAPHED, Way.GRAPHED))
    error_us = math.hypot(*(part.sample(way).error_us for part in deciding for way in Way))
    # Of one way's time alone: were it of the slower one's, a slower replay that changes nothing in the step, hidden
    # behind other work, would raise the margin and speak for graphs.
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
    """The decision after one more measurement; ``standing`` is the one before, None where there is none yet."""
    if standing is None:
        better = compared.gain_us(Way.UNGRAPHED) > compared.margin_us
        return Decision(Way.UNGRAPHED if better else Way.GRAPHED, compared)
    if compared.gain_us(standing.way.other) <= 2 * compared.margin_us:
        return Decision(standing.way, compared)
    if standing.against + 1 >= rules.flips_after:
        return Decision(standing.way.other, compared)
    return Decision(standing.way, compared, standing.against + 1)


def why_never_graphed(parts: Sequence[Restless], rules: Rules = Rules()) -> str | None:
    """Why functions that could not be compared are not graphed; None where they are."""
    few = min((part.replays for part in parts), default=rules.fewest_calls)
    calls = min((len(part.graphed_us) for part in parts), default=0)
    measured = min((len(part.ungraphed_us) for part in parts), default=0)
    if few >= rules.fewest_calls or calls < rules.fewest_recorded or measured < rules.fewest_calls:
        return None
    ungraphed_us = sum(statistics.median(part.ungraphed_us) for part in parts)
    graphed_us = sum(statistics.median(part.graphed_us) for part in parts)
    if graphed_us - ungraphed_us <= 2 * max(rules.floor_us, rules.margin * ungraphed_us):
        return None
    way, ours, other = Way.UNGRAPHED.value, _us(ungraphed_us), _us(graphed_us)
    return f"{way}: the host takes {ours} a call against {other}, and {few} of {calls} graphed calls were replays"


def next_way(ungraphed_calls: int, graphed_calls: int, clear: bool = False, rules: Rules = Rules()) -> Way | None:
    """Which way the next call is measured, None where nothing more is.

    Un-graphed calls come first, before the function is recorded: later ones would take its outputs out of the graph
    pool and make functions downstream record again. More replays are measured while the comparison is not ``clear``.
    """
    if ungraphed_calls < rules.fewest_calls:
        return Way.UNGRAPHED
    if graphed_calls < rules.fewest_calls:
        return Way.GRAPHED
    return None if clear or ungraphed_calls + graphed_calls >= rules.most_calls else Way.GRAPHED


def _loads(parts: Sequence[Part | Load], way: Way, costs: Costs) -> list[Load]:
    loads = []
    for part in parts:
        if isinstance(part, Load):
            loads.append(part)
            continue
        loads.append(part.sample(way).load)
        if way is Way.UNGRAPHED:
            loads.append(costs.of(part.handed))
    return loads


def _middle_half(values: Sequence[float]) -> float:
    """Between the quartiles; of fewer than four values, between the least and the greatest."""
    ordered = sorted(values)
    left_out = len(ordered) // 4
    return ordered[-1 - left_out] - ordered[left_out]


def _us(time_us: float) -> str:
    return f"{time_us:.1f} us" if time_us < 9.95 else f"{time_us:.0f} us"


def _megabytes(nbytes: int) -> str:
    size = nbytes / 1e6
    return "under 0.1 MB" if size < 0.1 else f"{size:.1f} MB" if size < 9.95 else f"{size:.0f} MB"
