"""The contents of a report: frozen records of what happened to each compiled graph and each function.

Sizes are bytes; ``_s`` means seconds. A *graph* is what Inductor compiles in one piece. Its graphed partitions, or all
of it if it is not split, are *functions*. Records are plain data and outlive the model they describe.
"""

from __future__ import annotations

from dataclasses import dataclass, field

# Keys of a graph module's ``meta``.
PLACED, WHY_NOT_PLACED, LEFT_ALONE = "pygraph_placed", "pygraph_why_not_placed", "pygraph_left_alone"


@dataclass(frozen=True, slots=True)
class Cause:
    """An operation that keeps a part of a graph outside of CUDA graphs."""

    reason: str  # in upstream's words: "DeviceCopy ops", "cpu ops"
    op: str  # "aten._to_copy.default"
    source: str | None  # "model.py:31 in forward: y = table.to(x.device)"


@dataclass(frozen=True, slots=True)
class PartitionInput:
    """A tensor that a partition reads, as known at compile time."""

    name: str
    graph_input: bool  # an input of the graph, not the result of another partition
    device: str
    dtype: str
    nbytes: int | None  # None if the size is symbolic
    consumers: dict[str, int]  # readers by kind: "triton", "extern", "copy", "cpu"
    shape: str = ""  # ``[8, s0]``: sizes, symbolic ones by name


@dataclass(frozen=True, slots=True)
class Partition:
    """A run of operations that is graphed as one, or not at all."""

    graphed: bool
    kernels: dict[str, int]  # scheduled operations by kind: "triton", "extern", "copy", "cpu"
    causes: tuple[Cause, ...] = ()  # why it is not graphed
    inputs: tuple[PartitionInput, ...] = ()
    outputs: tuple[str, ...] = ()  # names of the buffers it passes on

    @property
    def gpu_kernels(self) -> int:
        return sum(count for kind, count in self.kernels.items() if kind != "cpu")


@dataclass(frozen=True, slots=True)
class Placed:
    """A CPU value that the GPU needs."""

    value: str  # the operation's name
    # "made on the GPU", "a constant on the GPU", "computed once, a constant on the GPU", "taken where it came from",
    # "staged" or "copied".
    how: str
    why: str | None  # why it is copied or staged at each call; None if it is not
    source: str | None  # "model.py:31 in forward: y = table.to(x.device)"


@dataclass(frozen=True, slots=True)
class GraphRecord:
    """One compiled graph: how it is split, or why it is not graphed."""

    model: str  # class of the outermost module, or name of the compiled function
    compile_id: str | None
    mode: str  # "inference", "forward", "backward"
    partitions: tuple[Partition, ...]
    dropped: str | None  # why none of it is graphed; None if any of it is
    placed: tuple[Placed, ...] = ()  # what placement did with CPU values
    why_not_placed: str | None = None  # why placement left the graph alone
    source: str | None = None  # where its function begins, or continues after a graph break: "model.py:31 in forward"

    @property
    def kernels_outside(self) -> int:
        """GPU kernels compiled to run outside of CUDA graphs."""
        return sum(p.gpu_kernels for p in self.partitions if self.dropped or not p.graphed)

    @property
    def causes(self) -> tuple[Cause, ...]:
        return tuple(cause for p in self.partitions if not p.graphed for cause in p.causes)


@dataclass(frozen=True, slots=True)
class InputRecord:
    index: int
    name: str | None  # the placeholder node's name
    kind: str  # "static", "managed", "live"; "output": own memory of outputs; "value" if it is not a tensor
    device: str | None
    nbytes: int
    copied_bytes: int  # copied into the recording at each replay
    mutated: bool
    route: str | None = None  # of a live one: "patch" or "table" (a replay gets its address), "copy", "stage"
    why_copied: str | None = None


OWN_MEMORY, IN_POOL, ON_INPUT = "own", "pool", "input"
# Why calls took the slow path, each to follow "because", in the order in which C++ counts (native/fast_path.h: Slow).
SLOW_CALLS = (
    "no recording was ready",
    "another call used the graphs",
    "no recording followed the one before",
    "a static input moved",
    "other outputs were alive than when it was recorded",
    "the graph could not be given the inputs",
    "there was no memory for outputs",
    "inputs were copied, in Python",
    "the program captured the call",
)


@dataclass(frozen=True, slots=True)
class OutputRecord:
    number: int  # among the function's outputs
    place: str  # OWN_MEMORY (used again while the program does not use it), IN_POOL (the graph pool) or ON_INPUT
    nbytes: int
    nodes: int = 0  # of the graph that hold the address of own memory
    copied_bytes: int = 0  # by the graph at each replay, to own memory: a library allocates the output


@dataclass(frozen=True, slots=True)
class Branches:
    """The order that memory requires of a recording's operations, in place of the chain that was captured."""

    operations: int  # of the graph, each of one or more nodes
    barriers: int  # operations that keep their place among all others
    edges: int  # the fewest that keep the order
    depth: int  # operations on the longest path
    chain_us: float  # predicted time of the chain
    lanes_us: dict[int, float]  # by number of lanes: predicted time
    lanes: int = 1  # of the graph, whose operations run side by side if there are more
    dropped: int = 0  # edges of the captured chain that are not needed on these lanes
    measured_us: tuple[float, float] | None = None  # GPU time of a replay: of the chain, and on the lanes


@dataclass(frozen=True, slots=True)
class RecordingRecord:
    number: int  # the recording's, in its tree manager
    parent: int | None  # number of the recording that it follows
    reason: str  # why it was recorded: "first call", "static input arg0_1 moved", ...
    inputs: tuple[InputRecord, ...]
    kernels: int | None  # kernel nodes; None if the driver could not be asked
    other_nodes: int | None  # copies, memsets and the like
    record_s: float
    pool_bytes: int  # growth of the graph pool
    replays: int
    extra_copies: int = 0  # inputs copied for one call: less aligned than recorded, or in the graph pool
    extra_copied_bytes: int = 0
    outputs: tuple[OutputRecord, ...] = ()
    set_nodes: int = 0  # nodes that replays gave other addresses
    branches: Branches | None = None  # with pygraph_branches; None also if the chain must stay
    why_no_branches: str | None = None  # why the operations run one after another

    @property
    def copied_bytes(self) -> int:
        return sum(i.copied_bytes for i in self.inputs)

    def count(self, kind: str) -> int:
        return sum(i.kind == kind for i in self.inputs)


@dataclass(frozen=True, slots=True)
class MovedOutput:
    """An output of a function that outlived its step, and so was moved out of the graph pool."""

    number: int  # among the function's outputs
    times: int
    nbytes: int  # copied, all times together


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
    warmup_pool_bytes: int  # growth of the graph pool during warm-up
    ungraphed_calls: int  # calls that neither warmed up nor recorded, and were not replays
    ungraphed_reason: str | None
    decision: str | None = None  # "graphed: 41 us a call against 58 us (...)", with "auto"
    trial_calls: int = 0  # un-graphed calls that a measurement took
    route: str | None = None  # "by address: ..." or "by table: ...", once it was chosen
    awaits_table: bool = False  # a table was chosen, and its kernels are not built yet
    moved_outputs: tuple[MovedOutput, ...] = ()
    why_not_kept: str | None = None  # why outputs are overwritten although they should be kept
    slow_calls: dict[str, int] = field(default_factory=dict)  # by reason (SLOW_CALLS): calls that took the slow path
    blocks_allocated: int = 0  # of own memory of outputs
    blocks_given_away: int = 0  # to the program, which used them when a replay needed memory
    source: str | None = None  # as its graph's

    @property
    def why_ungraphed(self) -> str:
        return self.ungraphed_reason or "the limit of re-recordings, or capture failed"

    @property
    def replays(self) -> int:
        return sum(r.replays for r in self.recordings)

    @property
    def record_s(self) -> float:
        return sum(r.record_s for r in self.recordings)

    @property
    def pool_bytes(self) -> int:
        """Growth of the graph pool during warm-up and recording."""
        return self.warmup_pool_bytes + sum(r.pool_bytes for r in self.recordings)


@dataclass(frozen=True, slots=True)
class GraphBreak:
    """Code that Dynamo did not trace; the code before and after it is compiled separately, if at all."""

    reason: str  # in Dynamo's words
    source: str | None  # "model.py:31 in forward: if x.sum() > 0:"
    count: int
    advice: str | None = None  # what avoids it


@dataclass(frozen=True, slots=True)
class FeatureState:
    """A feature of the package: whether its patches are on, and if not, why."""

    name: str
    state: str  # "on", "off", "disabled"
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class HostWork:
    """How often work of the host around calls was done in C++, and how often by torch's own code."""

    at_once: int = 0
    by_torch: dict[str, int] = field(default_factory=dict)  # by reason


@dataclass(frozen=True, slots=True)
class Environment:
    pygraph_trees: str
    torch: str
    triton: str | None
    gpu: str | None
    features: tuple[FeatureState, ...] = ()
    native: str = "yes"  # whether the parts in C++ are used: "yes", or "no", what is lacking, and the reason
    backwards: HostWork = HostWork()  # accumulated gradients
    forwards: HostWork = HostWork()  # saved tensors for their backwards
    arguments: HostWork = HostWork()  # of all autograd functions, checked for dead wrappers of functorch
    calls: HostWork = HostWork()  # of compiled functions, made without Dynamo's guards


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
