"""Explains, without a GPU, how a program would run on one.

:func:`explain` lowers a program for a named architecture on fake tensors and returns an :class:`~.Explanation`. This
has each graph's partitions, the causes that keep some outside of CUDA graphs, the inputs of each graphed partition by
kind and bytes, graph breaks, and the effect of each feature under the current flags. Errors of the program are raised.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from torch.utils import _pytree as pytree

import inductor_patches
from pygraph_trees.errors import PygraphError
from pygraph_trees.fake_gpu import LoweredGraph, ValueNeededError, absent_gpu, lower
from pygraph_trees.fake_gpu.presence import architecture_of
from pygraph_trees.fake_gpu.tracing import modules_of
from pygraph_trees.reasons import Reason
from pygraph_trees.report import breaks
from pygraph_trees.report.compiled import partitions_of, rebinds_storage
from pygraph_trees.report.naming import mode_name
from pygraph_trees.report.records import PLACED, WHY_NOT_PLACED
from pygraph_trees.selection.functions import why_not_graphed
from pygraph_trees.settings import Settings

from .doctor import TO_DO
from .explanation import ExplainedGraph, ExplainedPartition, Explanation, Input, split_of
from .target import OnCpuError

if TYPE_CHECKING:
    from pygraph_trees.benchmark.program import Program


class PatchesOffError(PygraphError):
    template = "explain needs the patches of {feature!r}, and their state is {state!r}; {hint}"


def explain(
    program: Program, arch: str = "sm_90", progress: Callable[[int, int, str], None] = lambda done, total, text: None
) -> Explanation:
    """Explains a program whose GPU tensors are on ``meta``; ``progress`` gets steps done, their number, and text."""
    arch = architecture_of(arch)
    for status in inductor_patches.status():
        if status.state not in ("on", "waiting"):
            raise PatchesOffError(feature=status.feature, state=status.state, hint=TO_DO[status.state])
    # Torch logs an error of the program, which is raised too.
    quiet = mock.patch.object(logging.getLogger("torch._subclasses.fake_tensor"), "disabled", True)
    apart: Any = mock.patch.object(breaks, "noted", Counter())
    unplaced: tuple[int, int] | None = None
    with absent_gpu(arch), program.context(), quiet, apart:
        progress(0, 2, f"lowering {program.name} for {arch}")
        graphs, stop = _lowered(program, arch)
        found_breaks = breaks.records()
        if stop is None and any(graph.gm.meta.get(PLACED) for graph in graphs):
            torch._dynamo.reset()
            progress(1, 2, f"lowering {program.name} without placement")
            with torch._inductor.config.patch({"triton.pygraph_placement": "off"}):
                before, incomplete = _lowered(program, arch)
                unplaced = None if incomplete else split_of(map(_explained, before))
        progress(2, 2, "done")
    return Explanation(
        program=program.name,
        architecture=arch,
        torch=str(torch.__version__),
        graphs=tuple(map(_explained, graphs)),
        breaks=found_breaks,
        settings=asdict(Settings.current()),
        unplaced=unplaced,
        stop=stop,
    )


def _lowered(program: Program, arch: str) -> tuple[Sequence[LoweredGraph], str | None]:
    """The graphs of a program; if lowering stopped early, also the reason."""
    is_trained = program.training or program.is_step
    try:
        return lower(program.fn, program.args, program.kwargs, arch, training=is_trained), None
    except ValueNeededError as error:
        if not error.graphs:
            raise
        return error.graphs, str(error)
    except RuntimeError as error:
        if (found := _left_on_cpu(program)) is None:
            raise
        raise OnCpuError(found=found[1], left=found[0]) from error


def _left_on_cpu(program: Program) -> tuple[str, str] | None:
    """Which part is alone on the CPU, inputs or model, with a message about it; None if neither is."""
    leaves = pytree.tree_leaves((program.args, dict(program.kwargs)))
    inputs = {leaf.is_cpu for leaf in leaves if isinstance(leaf, torch.Tensor)}
    parameters = {
        tensor.is_cpu and not all_on_gpu
        for module, all_on_gpu in modules_of(program.fn).items()
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False))
    }
    if inputs == {True} and False in parameters:
        return "inputs", "all inputs are on the CPU, and parameters count as on the GPU"
    if parameters == {True} and False in inputs:
        return "model", "all parameters are on the CPU, and inputs on the GPU"
    return None


def _explained(graph: LoweredGraph) -> ExplainedGraph:
    # The names that the program gives the graph's inputs.
    names = dict(zip(graph.graph.graph_input_names, graph.input_names, strict=True))
    placed = [replace(value, value=names.get(value.value, value.value)) for value in graph.gm.meta.get(PLACED, ())]
    return ExplainedGraph(
        name=graph.name,
        mode=mode_name(is_backward=graph.is_backward, is_inference=graph.is_inference),
        not_graphed=_why_not_graphed(graph),
        partitions=tuple(_partitions(graph, names)),
        placed=tuple(placed),
        why_not_placed=graph.gm.meta.get(WHY_NOT_PLACED),
        source=graph.source,
    )


def _why_not_graphed(graph: LoweredGraph) -> str | None:
    left_out = why_not_graphed(Settings.current())
    if left_out is None and "cuda" not in graph.graph.device_types:
        return "all of its tensors are on the CPU; device='meta' stands for the GPU"
    return left_out or graph.disabled_reason or (Reason.REBINDS() if rebinds_storage(graph.gm) else None)


def _partitions(graph: LoweredGraph, names: Mapping[str, str]) -> Iterator[ExplainedPartition]:
    """The partitions of a lowered graph, with the kinds of their inputs and their ``names`` in the program."""
    static = {name for i, name in enumerate(graph.graph.graph_input_names) if i in set(graph.static_input_idxs)}
    managed: set[str] = set()
    for partition in partitions_of(graph.graph.scheduler):
        inputs = []
        for read in partition.inputs if partition.graphed else ():
            kind = "static" if read.name in static else "managed" if read.name in managed else "live"
            kind = kind if read.device.startswith("cuda") else "cpu"
            inputs.append(Input(names.get(read.name, read.name), kind, read))
        managed = managed | {*partition.outputs} if partition.graphed else managed - {*partition.outputs}
        yield ExplainedPartition(partition, tuple(inputs))
