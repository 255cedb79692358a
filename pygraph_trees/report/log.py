"""Notes facts about graphs, functions and recordings as they happen.

Logs hold plain data, so they outlive models and tensors; ``summary`` turns the process's :data:`journal` into frozen
records. A replay only increments a counter, which C++ may share. New facts also go to the logger ``pygraph_trees`` and,
as JSON artifacts, to torch's structured trace; a failed write is ignored.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict, dataclass, field, fields
from typing import Any, TypeVar

from torch._guards import CompileId
from torch._logging import trace_structured

from pygraph_trees.reasons import Reason, Why

from . import records
from .calls import Call

_log = logging.getLogger("pygraph_trees.report")

R = TypeVar("R", records.FunctionRecord, records.GraphRecord, records.RecordingRecord)


@dataclass(slots=True)
class Count:
    value: int = 0


@dataclass(slots=True)
class RecordingLog:
    number: int = -1
    parent: int | None = None
    reason: str = ""
    inputs: tuple[records.InputRecord, ...] = ()
    outputs: tuple[records.OutputRecord, ...] = ()
    kernels: int | None = None
    other_nodes: int | None = None
    record_s: float = 0.0
    pool_bytes: int = 0
    counter: Any = field(default_factory=Count)  # of replays
    extra_copies: int = 0
    extra_copied_bytes: int = 0
    has_fast_path: bool = True  # whether C++ may replay it
    was_interrupted: bool = False  # whether the call that made it raised, as an interrupt does
    sets: Any = field(default_factory=Count)  # of nodes that replays gave other addresses
    branches: records.Branches | None = None
    why_no_branches: Why | None = None
    is_tried: bool = False  # its replays show whether lanes pay

    @property
    def replays(self) -> int:
        return self.counter.value

    @property
    def copied_bytes(self) -> int:
        return sum(given.copied_bytes for given in self.inputs)

    @property
    def routes(self) -> Counter[str]:
        """The number of live inputs with each route."""
        return Counter(given.route for given in self.inputs if given.route is not None)

    def record(self) -> records.RecordingRecord:
        return _record(records.RecordingRecord, self, set_nodes=self.sets.value)


@dataclass(slots=True)
class FunctionLog:
    model: str
    compile_id: str | None
    mode: str
    partition: int
    settings: dict[str, str]
    graph: GraphLog | None = None
    has_collective: bool = False  # whether its code calls a collective, so that all ranks must decide alike
    recordings: list[RecordingLog] = field(default_factory=list)
    runs: int = 0  # of the compiled code: warm-ups, recordings and un-graphed calls
    warmups: int = 0
    warmup_pool_bytes: int = 0
    lacked: int = 0  # recordings that lacked memory
    ungraphed_reason: Why | None = None
    is_ungraphed_by_decision: bool = False  # and the reason says so
    trial_runs: int = 0  # of the compiled code, un-graphed for a measurement
    decision: str | None = None  # the measurements and the way that was taken
    route: Why | None = None  # how inputs are given since that was chosen, and why
    awaits_table: bool = False
    is_tried: bool = False  # its trial goes on
    is_choosing: bool = False  # replays with new addresses are counted for the choice of its route
    moved: dict[int, tuple[int, int]] = field(default_factory=dict)  # by output: how often it was moved, and bytes
    why_not_kept: Why | None = None
    slow: Sequence[Any] = ()  # calls that took the slow path, in the order of SLOW_CALLS
    blocks_allocated: Any = field(default_factory=Count)
    blocks_given_away: Any = field(default_factory=Count)
    traced_reasons: set[object] = field(default_factory=set)  # once each: two reasons may alternate from call to call
    described: dict[Any, Any] = field(default_factory=dict)  # inputs and outputs of recordings, each kept once

    @property
    def name(self) -> str:
        return f"{self.model} {self.compile_id or '-'} {self.mode} {self.partition}"

    @property
    def calls(self) -> tuple[Call, ...]:
        """The calls of its code, in order, as far as they are known."""
        parts = self.graph.calls if self.graph else ()
        return parts[self.partition - 1] if self.partition <= len(parts) else ()

    @property
    def newest_recording(self) -> int:
        """The largest number of a recording, -1 without any."""
        return max((recording.number for recording in self.recordings), default=-1)

    @property
    def replays(self) -> int:
        return sum(recording.replays for recording in list(self.recordings))

    @property
    def set_nodes(self) -> int:
        return sum(recording.sets.value for recording in list(self.recordings))

    @property
    def happened(self) -> tuple[object, ...]:
        """Facts that change when something is made or decided for it, but not at a replay or an un-graphed call."""
        return len(self.recordings), self.warmups, self.trial_runs, self.decision, self.route, self.awaits_table

    def recorded(self, recording: RecordingLog) -> None:
        for name in ("inputs", "outputs"):
            found = getattr(recording, name)
            setattr(recording, name, self.described.setdefault(found, found))
        self.recordings.append(recording)
        name, kernels = f"{self.name}: recording {recording.number}", recording.kernels
        facts = recording.reason, "?" if kernels is None else kernels, recording.copied_bytes, recording.record_s
        _log.info("%s: %s; %s kernels, %d bytes copied a replay, %.3f s", name, *facts)
        if found := recording.branches or recording.why_no_branches:
            _log.info("%s: branches: %s", name, found)
        _trace("pygraph_function", self)
        for given in recording.inputs if _log.isEnabledFor(logging.DEBUG) else ():
            _log.debug("%s: input %s", name, given)

    def output_moved(self, number: int, nbytes: int) -> None:
        """Notes that an output outlived its step and was moved out of the graph pool."""
        times, before = self.moved.get(number, (0, 0))
        self.moved[number] = times + 1, before + nbytes

    def route_was_found(self, text: Why, *, awaits_table: bool = False) -> None:
        """Notes how inputs are given from now on, and why; ``awaits_table``: its kernels are not built yet."""
        _log.info("%s: %s", self.name, text)
        is_news = text != self.route
        self.route, self.awaits_table = text, awaits_table
        if is_news:
            _trace("pygraph_function", self)

    def not_graphed(self, reason: Why) -> None:
        kind = getattr(reason, "reason", reason)
        if self._takes_reason(reason) and kind not in self.traced_reasons:
            self.traced_reasons.add(kind)
            _trace("pygraph_function", self)

    def decided(self, text: str | None, *, graphed: bool) -> None:
        """Notes which way the function's calls go from now on, and the measurements for a decision, if any."""
        is_news = text != self.decision
        self.decision = text
        was_refused = self.ungraphed_reason is not None and not self.recordings  # the reason stays
        if graphed and self.is_ungraphed_by_decision:
            self.ungraphed_reason, self.is_ungraphed_by_decision, is_news = None, False, True
        elif not graphed and not was_refused:
            is_news |= self._takes_reason(Reason.FASTER())
            self.is_ungraphed_by_decision = True
        if is_news:
            _trace("pygraph_function", self)

    def _takes_reason(self, reason: Why) -> bool:
        is_news = self.ungraphed_reason != reason
        if is_news:
            _log.info("%s: not graphed: %s", self.name, reason)
        self.ungraphed_reason, self.is_ungraphed_by_decision = reason, False
        return is_news

    def record(self) -> records.FunctionRecord:
        recordings = tuple(r.record() for r in list(self.recordings))
        return _record(
            records.FunctionRecord,
            self,
            partitions=max(self.partition, self.graph.functions if self.graph else 1),
            settings=dict(self.settings),
            recordings=recordings,
            ungraphed_calls=max(0, self.runs - self.warmups - len(recordings) - self.trial_runs),
            trial_calls=self.trial_runs,
            moved_outputs=tuple(records.MovedOutput(n, *seen) for n, seen in sorted(self.moved.copy().items())),
            slow_calls={
                why: calls.value for why, calls in zip(records.SLOW_CALLS, self.slow, strict=False) if calls.value
            },
            blocks_allocated=self.blocks_allocated.value,
            blocks_given_away=self.blocks_given_away.value,
            source=self.graph.source if self.graph else None,
        )


@dataclass(slots=True)
class GraphLog:
    model: str
    compile_id: str | None
    mode: str
    partitions: tuple[records.Partition, ...]
    dropped: str | None = None
    rebinds_storage: bool = False  # an operation replaces the memory of an input, which a replay would not repeat
    functions: int = 0  # passed to cudagraphify so far
    placed: tuple[records.Placed, ...] = ()
    why_not_placed: str | None = None
    code: str | None = None  # a key of its generated code, the same in every process
    source: str | None = None  # where its function begins, or continues after a graph break
    calls: tuple[tuple[Call, ...], ...] = ()  # of each function, in order

    def record(self) -> records.GraphRecord:
        return _record(records.GraphRecord, self)


def _record(kind: type[R], log: object, **facts: Any) -> R:
    """A record of these facts; the others are the log's, by the same names."""
    facts |= {f.name: getattr(log, f.name) for f in fields(kind) if f.name not in facts}
    return kind(**facts)


def _trace(name: str, log: FunctionLog | GraphLog) -> None:
    """Adds the current record of a log to torch's structured trace, if there is one; never raises."""
    try:
        trace_structured(
            "artifact",
            metadata_fn=lambda: {"name": name, "encoding": "json"},
            payload_fn=lambda: json.dumps(asdict(log.record()), indent=1),
            expect_trace_id=False,  # a recording is made at run time
            compile_id=CompileId.from_string(log.compile_id),
        )
    except Exception as error:
        _log.warning("%s is not in torch's structured trace: %s: %s", name, type(error).__name__, error)


_compiling: ContextVar[GraphLog | None] = ContextVar("pygraph_compiling", default=None)


class Journal:
    """The logs of the process, in the order of compilation. Thread-safe.

    Each step on a list is atomic. A lock could be waited for forever: a finalizer that comes under it may wait for a
    backward in another thread, whose compilation comes here.
    """

    def __init__(self) -> None:
        self._graphs: list[GraphLog] = []
        self._functions: list[FunctionLog] = []

    @contextmanager
    def compiling(self, graph: GraphLog) -> Iterator[None]:
        """Functions that are added inside belong to ``graph``."""
        token = _compiling.set(graph)
        try:
            yield
        finally:
            _compiling.reset(token)

    @property
    def graph(self) -> GraphLog | None:
        """The graph that this thread compiles."""
        return _compiling.get()

    def graph_of(self, compile_id: str | None) -> GraphLog | None:
        """The newest graph with a compile id; a backward, compiled later, has its forward's."""
        graphs = reversed(list(self._graphs))
        return next((g for g in graphs if compile_id is not None and g.compile_id == compile_id), None)

    def add_graph(self, graph: GraphLog) -> None:
        self._graphs.append(graph)
        name = f"{graph.model} {graph.compile_id or '-'}"
        graphed = f"{sum(p.graphed for p in graph.partitions)} graphed of {len(graph.partitions)} partitions"
        _log.info("%s %s: %s", name, graph.mode, f"not graphed: {graph.dropped}" if graph.dropped else graphed)
        _trace("pygraph_graph", graph)
        for cause in graph.record().causes:
            _log.debug("%s: outside: %s, %s, %s", name, cause.reason, cause.op, cause.source)

    def add_function(self, function: FunctionLog) -> None:
        self._functions.append(function)

    @property
    def functions(self) -> list[FunctionLog]:
        return list(self._functions)

    def records(self) -> tuple[tuple[records.GraphRecord, ...], tuple[records.FunctionRecord, ...]]:
        graphs, functions = list(self._graphs), list(self._functions)
        return tuple(g.record() for g in graphs), tuple(f.record() for f in functions)

    def clear(self) -> None:
        """Forgets all facts; functions that are still alive no longer appear."""
        self._graphs.clear()
        self._functions.clear()


journal = Journal()


def partition_from_json(data: dict[str, Any]) -> records.Partition:
    """The inverse of :func:`dataclasses.asdict`."""
    causes, inputs = [records.Cause(**c) for c in data["causes"]], [records.PartitionInput(**i) for i in data["inputs"]]
    tuples = {"causes": tuple(causes), "inputs": tuple(inputs), "outputs": tuple(data["outputs"])}
    return records.Partition(**{**data, **tuples})
