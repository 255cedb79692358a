"""What a report holds: frozen records of what happened to each compiled graph and each function.

Bytes are bytes, ``_s`` is seconds. A *graph* is what Inductor compiled in one piece; its graphed partitions (the whole
of it, where nothing splits it) are *functions*. Everything here is plain data: it outlives the model it speaks of.
"""

from __future__ import annotations

from dataclasses import dataclass, field

PLACED, WHY_NOT_PLACED = "pygraph_placed", "pygraph_why_not_placed"  # where a module keeps what was done to its graph


@dataclass(frozen=True, slots=True)
class Cause:
    """An operation that keeps a part of a graph outside of CUDA graphs."""

    reason: str  # as upstream words it: "DeviceCopy ops", "cpu ops"
    op: str  # "aten._to_copy.default"
    source: str | None  # "model.py:31 in forward: y = table.to(x.device)"


@dataclass(frozen=True, slots=True)
class PartitionInput:
    """A tensor that a partition reads, as known when it was compiled."""

    name: str
    graph_input: bool  # an input of the graph, not the result of another partition
    device: str
    dtype: str
    nbytes: int | None  # None where the size is symbolic
    consumers: dict[str, int]  # readers by kind: "triton", "extern", "copy", "cpu"


@dataclass(frozen=True, slots=True)
class Partition:
    """A run of operations that is graphed as one, or not at all."""

    graphed: bool
    kernels: dict[str, int]  # scheduled operations by kind: "triton", "extern", "copy", "cpu"
    causes: tuple[Cause, ...] = ()  # why it is not graphed
    inputs: tuple[PartitionInput, ...] = ()
    outputs: tuple[str, ...] = ()  # names of the buffers it hands on

    @property
    def gpu_kernels(self) -> int:
        return sum(count for kind, count in self.kernels.items() if kind != "cpu")


@dataclass(frozen=True, slots=True)
class Placed:
    """A value of the CPU that the GPU needs."""

    value: str  # the operation's name
    how: str  # "made on the GPU", "a constant on the GPU", "taken where it came from", "staged", "copied"; or it was
    # "computed once, a constant on the GPU"
    why: str | None  # why it is copied or staged at each call; None where it is not
    source: str | None  # "model.py:31 in forward: y = table.to(x.device)"


@dataclass(frozen=True, slots=True)
class GraphRecord:
    """One compiled graph: how it was split, or why it is not graphed."""

    model: str  # class of the outermost module, or name of the compiled function
    compile_id: str | None
    mode: str  # "inference", "forward", "backward"
    partitions: tuple[Partition, ...]
    dropped: str | None  # why none of it is graphed, None where something is
    placed: tuple[Placed, ...] = ()  # what placement did about values of the CPU
    why_not_placed: str | None = None  # why it left the graph alone

    @property
    def kernels_outside(self) -> int:
        """GPU kernels that were compiled to run outside of CUDA graphs."""
        return sum(p.gpu_kernels for p in self.partitions if self.dropped or not p.graphed)

    @property
    def causes(self) -> tuple[Cause, ...]:
        return tuple(cause for p in self.partitions if not p.graphed for cause in p.causes)


@dataclass(frozen=True, slots=True)
class InputRecord:
    """An input of a recording."""

    index: int
    name: str | None  # the placeholder's
    kind: str  # "static", "managed", "live"; "value" for what is not a tensor
    device: str | None
    nbytes: int
    copied_bytes: int  # copied into the recording at each replay
    mutated: bool
    route: str | None = None  # of a live one: "patch" or "table" (a replay gets its address), "copy", "stage"
    why_copied: str | None = None


@dataclass(frozen=True, slots=True)
class RecordingRecord:
    """One captured graph."""

    number: int  # of the recording, in its tree manager
    parent: int | None  # number of the recording that it follows
    reason: str  # why it was recorded: "first call", "static input arg0_1 moved", ...
    inputs: tuple[InputRecord, ...]
    kernels: int | None  # kernel nodes; None where the driver could not be asked
    other_nodes: int | None  # copies, memsets and whatever else
    record_s: float
    pool_bytes: int  # by how much the graph pool grew
    replays: int
    extra_copies: int = 0  # inputs copied for one call: less aligned than recorded, or in the graph pool
    extra_copied_bytes: int = 0

    @property
    def copied_bytes(self) -> int:
        return sum(i.copied_bytes for i in self.inputs)

    def count(self, kind: str) -> int:
        return sum(i.kind == kind for i in self.inputs)


@dataclass(frozen=True, slots=True)
class FunctionRecord:
    """One function: a whole graph or one partition of it."""

    model: str
    compile_id: str | None
    mode: str
    partition: int  # from 1
    partitions: int  # graphed ones of the same graph
    settings: dict[str, str]
    recordings: tuple[RecordingRecord, ...]
    warmups: int
    warmup_pool_bytes: int  # by how much warming up made the graph pool grow
    ungraphed_calls: int  # calls that neither warmed up nor recorded, and were not replays
    ungraphed_reason: str | None
    decision: str | None = None  # "graphed: 41 us a call against 58 us (2 kernels)", where both ways were measured
    route: str | None = (
        None  # "table: 13.1 us of a replay against 29.7 us by address (...)", where a table could be had
    )

    @property
    def replays(self) -> int:
        return sum(r.replays for r in self.recordings)

    @property
    def record_s(self) -> float:
        return sum(r.record_s for r in self.recordings)

    @property
    def pool_bytes(self) -> int:
        """By how much warming up and recording made the graph pool grow."""
        return self.warmup_pool_bytes + sum(r.pool_bytes for r in self.recordings)


@dataclass(frozen=True, slots=True)
class GraphBreak:
    """What Dynamo did not trace: what stands before and behind it is compiled apart, if at all."""

    reason: str  # as Dynamo words it
    source: str | None  # line of the program, where Dynamo says it
    count: int


@dataclass(frozen=True, slots=True)
class FeatureState:
    """A feature of the package: whether its patches are on, and if not, why."""

    name: str
    state: str  # "on", "off", "disabled"
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class Environment:
    """Where the report was made."""

    pygraph_trees: str
    torch: str
    triton: str | None
    gpu: str | None
    features: tuple[FeatureState, ...] = field(default=())


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All records at one moment."""

    environment: Environment
    graphs: tuple[GraphRecord, ...]
    functions: tuple[FunctionRecord, ...]
    breaks: tuple[GraphBreak, ...] = ()

    @property
    def recordings(self) -> int:
        return sum(len(f.recordings) for f in self.functions)

    @property
    def replays(self) -> int:
        return sum(f.replays for f in self.functions)
