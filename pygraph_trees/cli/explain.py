"""Explains, without a GPU, how a program would run on one.

:func:`explain` lowers a program for a named architecture on fake tensors and returns a text: each graph's partitions,
what keeps some of them outside of CUDA graphs, the inputs of each graphed partition by kind and bytes, the readers of
live inputs, and the effect of each feature under the current flags. Errors of the program are raised.
"""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from pygraph_trees.fake_gpu import ValueNeededError, absent_gpu, lower
from pygraph_trees.report.compiled import partitions_of
from pygraph_trees.report.naming import mode_name
from pygraph_trees.report.records import PLACED, WHY_NOT_PLACED, Partition, PartitionInput
from pygraph_trees.report.text import cause_line, nbytes, placed_lines, table
from pygraph_trees.settings import Settings

if TYPE_CHECKING:
    from pygraph_trees.benchmark.program import Program
    from pygraph_trees.fake_gpu import LoweredGraph

_MOST_INPUTS = 12  # live inputs listed per partition
_MOST_CAUSES = 8  # per partition
_WIDTH = 100


@dataclass(frozen=True, slots=True)
class Input:
    """An input of a graphed partition, as compiled, with its kind in a recording."""

    name: str
    kind: str  # "static", "managed", "live", or "cpu" for a live one on the CPU
    read: PartitionInput


@dataclass(frozen=True, slots=True)
class ExplainedPartition:
    partition: Partition
    inputs: tuple[Input, ...]  # empty if it is not graphed

    def nbytes(self, kind: str) -> int:
        return sum(i.read.nbytes or 0 for i in self.inputs if i.kind == kind)


Explained = Sequence[tuple["LoweredGraph", list[ExplainedPartition]]]


def explain(program: Program, arch: str = "sm_90") -> str:
    """Explains a program whose GPU tensors are on ``meta``; raises what the program raises."""
    before: Sequence[LoweredGraph] | None = None
    with absent_gpu(arch), program.context():
        graphs, stop = _lowered(program, arch)
        if stop is None and any(graph.gm.meta.get(PLACED) for graph in graphs):
            torch._dynamo.reset()
            with torch._inductor.config.patch({"triton.pygraph_placement": "off"}):
                before, incomplete = _lowered(program, arch)
                before = None if incomplete else before  # no figure to compare with
    explained = [(graph, list(partitions(graph))) for graph in graphs]
    unplaced = None if before is None else [(graph, list(partitions(graph))) for graph in before]
    head = f"{program.name} for {arch}, torch {torch.__version__}: {_count(len(graphs), 'graph')}"
    parts = [head, *(_graph(*both) for both in explained)]
    if stop is not None:
        parts.append(textwrap.fill(f"What comes behind cannot be told: {stop}", _WIDTH))
    return "\n\n".join([*parts, _features(explained, unplaced)])


def _lowered(program: Program, arch: str) -> tuple[Sequence[LoweredGraph], str | None]:
    """The graphs of a program; if lowering stopped early, also the reason."""
    try:
        return lower(program.fn, program.args, program.kwargs, arch, training=program.training), None
    except ValueNeededError as error:
        if not error.graphs:
            raise
        return error.graphs, str(error)


def partitions(graph: LoweredGraph) -> Iterator[ExplainedPartition]:
    """The partitions of a lowered graph, with the kinds of their inputs."""
    names = dict(zip(graph.graph.graph_input_names, graph.input_names, strict=True))
    static = {name for i, name in enumerate(graph.graph.graph_input_names) if i in set(graph.static_input_idxs)}
    managed: set[str] = set()
    for partition in partitions_of(graph.graph.scheduler):
        inputs = []
        for read in partition.inputs if partition.graphed else ():
            if not read.device.startswith("cuda"):
                kind = "cpu"
            elif read.name in static:
                kind = "static"
            else:
                kind = "managed" if read.name in managed else "live"
            inputs.append(Input(names.get(read.name, read.name), kind, read))
        managed = managed | {*partition.outputs} if partition.graphed else managed - {*partition.outputs}
        yield ExplainedPartition(partition, tuple(inputs))


def _graph(graph: LoweredGraph, parts: Sequence[ExplainedPartition]) -> str:
    mode = mode_name(is_backward=graph.is_backward, is_inference=graph.is_inference)
    title = f"{graph.name}, {mode}"
    if graph.disabled_reason:
        kernels = _kernels(sum((Counter(p.partition.kernels) for p in parts), Counter()))
        return f"{title}: not graphed, {kernels} outside: {' '.join(graph.disabled_reason.split())}"
    graphed = sum(p.partition.graphed for p in parts)
    lines = [f"{title}: {_count(len(parts), 'partition')}, {'all' if graphed == len(parts) else graphed} graphed"]
    for number, part in enumerate(parts, 1):
        lines += [f"  {line}" for line in _partition(number, part)]
    return "\n".join(lines)


def _partition(number: int, part: ExplainedPartition) -> Iterator[str]:
    partition, inputs = part.partition, part.inputs
    state = "graphed" if partition.graphed else "outside of CUDA graphs"
    yield f"partition {number}, {state}: {_kernels(Counter(partition.kernels))}"
    if not partition.graphed:
        for cause in partition.causes[:_MOST_CAUSES]:
            yield from textwrap.wrap(
                f"because of {cause_line(cause)}", _WIDTH, initial_indent="  ", subsequent_indent="      "
            )
        if len(partition.causes) > _MOST_CAUSES:
            yield f"  and {len(partition.causes) - _MOST_CAUSES} more"
        return
    kinds = Counter(i.kind for i in inputs)
    by_kind = [f"{kinds[k]} {k} ({nbytes(part.nbytes(k))})" for k in ("static", "managed", "live", "cpu") if kinds[k]]
    yield f"  inputs: {', '.join(by_kind) or 'none'}"
    live = sorted((i for i in inputs if i.kind in ("live", "cpu")), key=lambda i: -(i.read.nbytes or 0))
    if live:
        head = ("live input", "on", "dtype", "bytes", "read by")
        rows = [_row(i) for i in live[:_MOST_INPUTS]]
        yield from (f"    {line}" for line in table(head, rows, _WIDTH - 6).splitlines())
    if len(live) > _MOST_INPUTS:
        yield f"    and {len(live) - _MOST_INPUTS} more"


def _row(item: Input) -> tuple[str, ...]:
    size = "symbolic" if item.read.nbytes is None else nbytes(item.read.nbytes)
    return item.name, item.read.device, item.read.dtype, size, _kernels(Counter(item.read.consumers))


def _kernels(counts: Counter[str]) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items())) or "no kernels"


def _split(explained: Explained) -> tuple[int, int]:
    """The number of partitions, and how many are outside of CUDA graphs."""
    parts = [p for graph, some in explained if not graph.disabled_reason for p in some]
    return len(parts), sum(not p.partition.graphed for p in parts)


def _placement(explained: Explained, before: Explained | None) -> Iterator[str]:
    parts, outside = _split(explained)
    now = f"{_count(parts, 'partition')}, {outside or 'none'} outside of CUDA graphs"
    if before is None or _split(before) == (parts, outside):
        yield now
    else:
        parts, outside = _split(before)
        yield f"{now}; without it {parts}, {outside or 'none'} outside"
    for graph, _ in explained:
        yield from placed_lines(graph.gm.meta.get(PLACED, ()))
        if graph.gm.meta.get(WHY_NOT_PLACED):
            yield f"{graph.name} is left alone, because {graph.gm.meta[WHY_NOT_PLACED]}"


def _features(explained: Explained, before: Explained | None = None) -> str:
    settings = Settings.current()
    graphed = [p for graph, parts in explained if not graph.disabled_reason for p in parts if p.partition.graphed]
    done = "nothing is graphed" if settings.selective == "never" else f"{_count(len(graphed), 'function')} graphed"
    placement, *moves = _placement(explained, before)
    indirection = "; ".join(_given(graphed, by_address=settings.indirection != "off")) or "no live inputs"
    return "\n".join(
        [
            "What the features do about it:",
            f"  placement {settings.placement}: {placement}",
            *(textwrap.fill(move, _WIDTH, initial_indent="    ", subsequent_indent="      ") for move in moves),
            f"  indirection {settings.indirection}: {indirection}",
            f"  selective {settings.selective}: {done}",
        ]
    )


def _given(graphed: Sequence[ExplainedPartition], *, by_address: bool) -> Iterator[str]:
    """How replays take the live inputs, as far as their device determines it."""
    ways: dict[str, tuple[str, ...]] = {"given by address": ("live",), "staged at each replay": ("cpu",)}
    if not by_address:
        ways = {"copied at each replay": ("live", "cpu")}
    for how, kinds in ways.items():
        inputs = [i for p in graphed for i in p.inputs if i.kind in kinds]
        if inputs:
            total = nbytes(sum(i.read.nbytes or 0 for i in inputs))
            yield f"{_count(len(inputs), 'live input')}, {total}, {how}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
