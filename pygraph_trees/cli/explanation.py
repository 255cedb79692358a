"""The result of ``explain``: records of lowered graphs, as text, JSON or an HTML page.

The text fits 100 columns.
"""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass

from pygraph_trees.report.markup import Section, Shown, preformatted, render
from pygraph_trees.report.page import document
from pygraph_trees.report.records import GraphBreak, Partition, PartitionInput, Placed
from pygraph_trees.report.text import amounts, break_line, cause_line, counted, first_lines, nbytes, placed_lines, table

_MOST_INPUTS = 12  # live inputs listed per partition
_MOST_CAUSES = 8  # per partition
WIDTH = 100
_HEAD = ("live input", "on", "dtype", "bytes", "read by")
_BRANCHES = {"always": "operations of a graph that are independent run side by side"}
_BRANCHES["auto"] = f"{_BRANCHES['always']}, if a trial of real calls finds that faster"
_LEGEND = textwrap.fill(
    "Kernels are generated (triton) or a library's (extern). Inputs are parameters and buffers (static), outputs of an "
    "earlier graph (managed), or come with each call (live; cpu if on the CPU).",
    WIDTH,
)


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

    @property
    def live(self) -> list[Input]:
        """The live inputs, the largest first."""
        return sorted((i for i in self.inputs if i.kind in ("live", "cpu")), key=lambda i: -(i.read.nbytes or 0))


@dataclass(frozen=True, slots=True)
class ExplainedGraph:
    name: str
    mode: str
    not_graphed: str | None  # why none of it is graphed
    partitions: tuple[ExplainedPartition, ...]
    placed: tuple[Placed, ...]
    why_not_placed: str | None
    source: str | None  # where its function begins, or continues after a graph break: "model.py:31 in forward"


@dataclass(frozen=True, slots=True)
class Explanation(Shown):
    """How a program would run on a GPU; prints as text."""

    program: str
    architecture: str  # of the GPU
    torch: str
    graphs: tuple[ExplainedGraph, ...]
    breaks: tuple[GraphBreak, ...]
    settings: Mapping[str, str]  # the flags
    unplaced: tuple[int, int] | None  # without placement: the partitions, and how many are outside of CUDA graphs
    stop: str | None  # why the rest of the program is not known

    def to_text(self) -> str:
        """Tables and lines of at most 104 columns."""
        head = f"{self.program} for {self.architecture}, torch {self.torch}: {counted(len(self.graphs), 'graph')}"
        parts = [head, *(_graph(graph) for graph in self.graphs)]
        if self.breaks:
            lines = [f"{counted(sum(b.count for b in self.breaks), 'graph break')}:"]
            for b in self.breaks:
                lines += textwrap.wrap(break_line(b), WIDTH, initial_indent="  ", subsequent_indent="      ")
            parts.append("\n".join(lines))
        if self.stop is not None:
            parts.append(textwrap.fill(f"The rest is unknown: {self.stop}", WIDTH))
        return "\n\n".join([*parts, _features(self), _LEGEND])

    def _page(self) -> str:
        sections = [] if self.stop is None else [Section("rest", "Unknown", render("problems", problems=[self.stop]))]
        if self.breaks:
            sections.append(Section("breaks", "Graph breaks", render("breaks", breaks=self.breaks)))
        sections.append(Section("features", "Features", preformatted(_features(self))))
        for number, graph in enumerate(self.graphs):
            body = render(
                "explained", graph=graph, by_kind=_by_kind, causes=_causes, head=_HEAD, heading=_title, row=_row
            )
            sections.append(Section(f"graph{number}", f"{graph.name}, {graph.mode}", body))
        lines = [f"explained for {self.architecture}, torch {self.torch}: {counted(len(self.graphs), 'graph')}"]
        return document(self.program, lines, "", sections, asdict(self))


def split_of(graphs: Iterable[ExplainedGraph]) -> tuple[int, int]:
    """The number of partitions, and how many are outside of CUDA graphs."""
    parts = [p for graph in graphs if graph.not_graphed is None for p in graph.partitions]
    return len(parts), sum(not p.partition.graphed for p in parts)


def _graph(graph: ExplainedGraph) -> str:
    title = f"{graph.name}, {graph.mode}"
    source = [f"  compiled from {graph.source}"] if graph.source else []
    if graph.not_graphed is not None:
        outside = _kernels(sum((Counter(p.partition.kernels) for p in graph.partitions), Counter()))
        line = f"{title}: not graphed, {outside} outside: {graph.not_graphed}"
        return "\n".join([textwrap.fill(line, WIDTH, subsequent_indent="  "), *source])
    parts, graphed = len(graph.partitions), sum(p.partition.graphed for p in graph.partitions)
    head = f"{title}: {counted(parts, 'partition')}, {'all' if graphed == parts else graphed} graphed"
    inside = (f"  {line}" for number, part in enumerate(graph.partitions, 1) for line in _partition(number, part))
    return "\n".join([head, *source, *inside])


def _partition(number: int, part: ExplainedPartition) -> Iterator[str]:
    yield _title(number, part.partition)
    if not part.partition.graphed:
        for line in _causes(part.partition):
            yield from textwrap.wrap(line, WIDTH, initial_indent="  ", subsequent_indent="      ")
        return
    yield f"  inputs: {_by_kind(part)}"
    if live := part.live:
        rows = [_row(i) for i in live[:_MOST_INPUTS]]
        yield from (f"    {line}" for line in table(_HEAD, rows, WIDTH - 6).splitlines())
    if len(live) > _MOST_INPUTS:
        yield f"    and {len(live) - _MOST_INPUTS} more"


def _title(number: int, partition: Partition) -> str:
    state = "graphed" if partition.graphed else "outside of CUDA graphs"
    return f"partition {number}, {state}: {_kernels(partition.kernels)}"


def _causes(partition: Partition) -> list[str]:
    return first_lines([f"because of {cause_line(cause)}" for cause in partition.causes], _MOST_CAUSES)


def _by_kind(part: ExplainedPartition) -> str:
    kinds = Counter(i.kind for i in part.inputs)
    in_order = [kind for kind in ("static", "managed", "live", "cpu") if kinds[kind]]
    return ", ".join(f"{kinds[kind]} {kind} ({_size(part.inputs, kind)})" for kind in in_order) or "none"


def _size(inputs: Iterable[Input], *kinds: str) -> str:
    return nbytes(sum(i.read.nbytes or 0 for i in inputs if i.kind in kinds))


def _row(item: Input) -> tuple[str, ...]:
    size = item.read.shape if item.read.nbytes is None else nbytes(item.read.nbytes)
    return item.name, item.read.device, item.read.dtype, size, _kernels(item.read.consumers)


def _kernels(counts: Mapping[str, int]) -> str:
    return amounts(dict(sorted(counts.items()))) or "no kernels"


def _placement(found: Explanation) -> Iterator[str]:
    parts, outside = split_of(found.graphs)
    now = f"{counted(parts, 'partition')}, {outside or 'none'} outside of CUDA graphs" if parts else "no partitions"
    if found.unplaced is None or found.unplaced == (parts, outside):
        yield now
    else:
        parts, outside = found.unplaced
        yield f"{now}; without it {parts}, {outside or 'none'} outside"
    for graph in found.graphs:
        yield from placed_lines(graph.placed)
        if graph.why_not_placed:
            yield f"{graph.name} is left alone, because {graph.why_not_placed}"


def _features(found: Explanation) -> str:
    settings = found.settings
    graphed = [p for g in found.graphs if g.not_graphed is None for p in g.partitions if p.partition.graphed]
    done = f"{counted(len(graphed), 'function')} graphed" if graphed else "nothing is graphed"
    if graphed and settings["selective"] == "auto":
        done += ", if that is faster"
    placement, *moves = _placement(found)
    indirection = "; ".join(_given(graphed, by_address=settings["indirection"] != "off")) or "no live inputs"
    return "\n".join(
        [
            "What pygraph_trees does:",
            f"  placement {settings['placement']}: {placement}",
            *(textwrap.fill(move, WIDTH, initial_indent="    ", subsequent_indent="      ") for move in moves),
            f"  indirection {settings['indirection']}: {indirection}",
            f"  selective {settings['selective']}: {done}",
            *([f"  branches {settings['branches']}: {how}"] if (how := _BRANCHES.get(settings["branches"])) else []),
        ]
    )


def _given(graphed: Sequence[ExplainedPartition], *, by_address: bool) -> Iterator[str]:
    """How replays take the live inputs, as far as their device determines it."""
    ways = [("given by address", ["live"]), ("staged at each replay", ["cpu"])]
    for how, kinds in ways if by_address else [("copied at each replay", ["live", "cpu"])]:
        if inputs := [i for p in graphed for i in p.inputs if i.kind in kinds]:
            yield f"{counted(len(inputs), 'live input')}, {_size(inputs, *kinds)}, {how}"
