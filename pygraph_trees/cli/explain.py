"""Explains, without a GPU, how a program would run on one.

:func:`explain` lowers a program for a named architecture on fake tensors and returns an :class:`~.Explanation`: each
graph's partitions, what keeps some of them outside of CUDA graphs, the inputs of each graphed partition by kind and
bytes, graph breaks, and the effect of each feature under the current flags. Errors of the program are raised.
"""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

import torch

from pygraph_trees.fake_gpu import ValueNeededError, absent_gpu, lower
from pygraph_trees.report.compiled import partitions_of
from pygraph_trees.report.naming import mode_name
from pygraph_trees.report.records import PLACED, WHY_NOT_PLACED
from pygraph_trees.report.summary import breaks_in
from pygraph_trees.settings import Settings

from .explanation import ExplainedGraph, ExplainedPartition, Explanation, Input

if TYPE_CHECKING:
    from pygraph_trees.benchmark.program import Program
    from pygraph_trees.fake_gpu import LoweredGraph

Progress = Callable[[int, int, str], None]


def explain(program: Program, arch: str = "sm_90", progress: Progress | None = None) -> Explanation:
    """Explains a program whose GPU tensors are on ``meta``; raises what the program raises.

    Args:
        progress: called with the steps done, their number, and the name of the next one.
    """
    tell = progress or (lambda done, total, text: None)
    before: Sequence[LoweredGraph] | None = None
    breaks: Counter[str] = Counter()
    with absent_gpu(arch), program.context(), _quiet():
        tell(0, 2, f"lowering {program.name} for {arch}")
        graphs, stop = _lowered(program, arch, breaks)
        if stop is None and any(graph.gm.meta.get(PLACED) for graph in graphs):
            torch._dynamo.reset()
            tell(1, 2, f"lowering {program.name} without placement")
            with torch._inductor.config.patch({"triton.pygraph_placement": "off"}):
                before, incomplete = _lowered(program, arch, Counter())
                before = None if incomplete else before  # no figure to compare with
        tell(2, 2, "done")
    found = Explanation(
        program=program.name,
        architecture=arch,
        torch=str(torch.__version__),
        graphs=tuple(map(_explained, graphs)),
        breaks=tuple(breaks_in(breaks)),
        settings=asdict(Settings.current()),
        unplaced=None,
        stop=stop,
    )
    return (
        found
        if before is None
        else replace(found, unplaced=replace(found, graphs=tuple(map(_explained, before))).split)
    )


def _lowered(program: Program, arch: str, breaks: Counter[str]) -> tuple[Sequence[LoweredGraph], str | None]:
    """The graphs of a program; if lowering stopped early, also the reason."""
    is_trained = program.training or program.is_step
    try:
        return lower(program.fn, program.args, program.kwargs, arch, training=is_trained, breaks=breaks), None
    except ValueNeededError as error:
        if not error.graphs:
            raise
        return error.graphs, str(error)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keeps torch from logging an error of the program, which is raised too."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def _explained(graph: LoweredGraph) -> ExplainedGraph:
    names = _readable_names(graph)
    placed = (replace(value, value=names.get(value.value, value.value)) for value in graph.gm.meta.get(PLACED, ()))
    return ExplainedGraph(
        name=graph.name,
        mode=mode_name(is_backward=graph.is_backward, is_inference=graph.is_inference),
        not_graphed=graph.disabled_reason or None,
        partitions=tuple(partitions(graph)),
        placed=tuple(placed),
        why_not_placed=graph.gm.meta.get(WHY_NOT_PLACED),
    )


def _readable_names(graph: LoweredGraph) -> dict[str, str]:
    """The names that the program gives the graph's inputs."""
    return dict(zip(graph.graph.graph_input_names, graph.input_names, strict=True))


def partitions(graph: LoweredGraph) -> Iterator[ExplainedPartition]:
    """The partitions of a lowered graph, with the kinds of their inputs."""
    names = _readable_names(graph)
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
