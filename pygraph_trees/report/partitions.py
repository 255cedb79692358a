"""Reads a scheduled Inductor graph: its partitions, what keeps some outside of CUDA graphs, and the readers of inputs.

:func:`describe` takes a ``Scheduler`` with its partitions and signatures; :func:`whole` describes a graph that was not
partitioned. Nothing is changed. An unknown fact (a symbolic size, a node without a source line) is None.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch._inductor import ir
from torch._inductor.scheduler import BaseSchedulerNode, GroupedSchedulerNode, NopKernelSchedulerNode, Scheduler
from torch._inductor.virtualized import V

from pygraph_trees.reasons import Reason

from .naming import FRAME, source_line
from .records import Cause, Partition, PartitionInput

_MOST_CAUSES = 20  # of one partition; its kernels are counted in full


def describe(
    scheduler: Scheduler, partitions: Sequence[Sequence[BaseSchedulerNode]], signatures: Sequence[Any]
) -> tuple[Partition, ...]:
    """The partitions of a graph; ``signatures`` are upstream's ``GraphPartitionSignature``, one per partition."""
    return tuple(
        Partition(
            graphed=not signature.skip_cudagraph,
            kernels=dict(Counter(kind for node in nodes for kind in _kinds(node))),
            causes=_causes(scheduler, nodes) if signature.skip_cudagraph else (),
            inputs=tuple(_inputs(scheduler, signature.input_nodes, nodes)),
            outputs=tuple(output.get_name() for output in signature.output_nodes),
        )
        for nodes, signature in zip(partitions, signatures, strict=True)
    )


def whole(scheduler: Scheduler) -> tuple[Partition, ...]:
    """An unpartitioned graph as one partition, which is graphed or dropped as a whole."""
    kernels = Counter(kind for node in scheduler.nodes for kind in _kinds(node))
    return (Partition(graphed=True, kernels=dict(kernels)),)


def _kinds(node: BaseSchedulerNode) -> Iterator[str]:
    """The kinds of kernels that a scheduled node becomes; a fused node is one kernel."""
    if isinstance(node, GroupedSchedulerNode):
        for part in node.snodes:
            yield from _kinds(part)
    elif isinstance(node, NopKernelSchedulerNode) or isinstance(node.node, ir.MultiOutput):
        return
    elif isinstance(node.node, ir.DeviceCopy):
        yield "copy"
    elif not node.is_gpu():
        yield "cpu"
    elif node.is_extern() and not node.is_template():
        yield "extern"
    else:
        yield "triton"


def _causes(scheduler: Scheduler, nodes: Sequence[BaseSchedulerNode]) -> tuple[Cause, ...]:
    counted = [node for node in nodes if any(_kinds(node))]
    reasons = ((scheduler.should_partition(node), node) for node in counted)
    causes = tuple(dict.fromkeys(Cause(str(reason), *_operation(node)) for reason, node in reasons if reason))
    if not causes and counted:  # since torch 2.12
        return (Cause(str(Reason.SMALL()), *_operation(counted[0])),)
    return causes[:_MOST_CAUSES]


def _operation(node: BaseSchedulerNode) -> tuple[str, str | None]:
    """Name and source line of the operation that a scheduled node comes from."""
    if not (origins := [o for leaf in node.get_nodes() for o in getattr(leaf.node, "origins", ())]):
        return type(node.node).__name__, None
    origin = next((o for o in origins if o.meta.get("stack_trace")), origins[0])
    # What a pass added may have no line of its own, such as the seeds of random numbers.
    lines = (source_line(node.meta.get("stack_trace")) for node in (origin, *origin.users))
    return str(origin.target), next(filter(None, lines), None)


def _inputs(
    scheduler: Scheduler, input_nodes: dict[str, Any], nodes: Sequence[BaseSchedulerNode]
) -> Iterator[PartitionInput]:
    consumers: dict[str, Counter[str]] = {name: Counter() for name in input_nodes}
    for node in nodes:
        kinds = list(_kinds(node))
        # A mutated buffer has another name afterwards.
        used = {dep.name for dep in (*node.read_writes.reads, *node.read_writes.writes)}
        for name in consumers.keys() & {scheduler.mutation_real_name.get(name, name) for name in used}:
            consumers[name].update(kinds)
    for name, value in input_nodes.items():
        try:
            device, dtype, size = value.get_device(), value.get_dtype(), value.get_size()
        except (AttributeError, NotImplementedError):  # not a tensor: a symbol, a script object
            continue
        if not isinstance(dtype, torch.dtype):
            continue
        yield PartitionInput(
            name=name,
            graph_input=name in V.graph.graph_inputs,
            device=str(device),
            dtype=str(dtype).removeprefix("torch."),
            nbytes=_nbytes(size, dtype),
            consumers=dict(consumers[name]),
            shape=f"[{', '.join(map(str, size))}]",
        )


def _nbytes(size: Sequence[Any], dtype: torch.dtype) -> int | None:
    try:
        return math.prod(int(s) for s in size) * dtype.itemsize
    except TypeError:  # a symbolic size
        return None


def model_name(gm: torch.fx.GraphModule) -> str:
    """The class of the outermost module that the graph's operations come from; otherwise the function's name."""
    modules: Counter[str] = Counter()
    functions: Counter[str] = Counter()
    for node in gm.graph.nodes:
        if stack := node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack"):
            outermost = next(iter(stack.values()))[1]
            modules[outermost.rsplit(".", 1)[-1] if isinstance(outermost, str) else outermost.__name__] += 1
        elif frame := FRAME.search(node.meta.get("stack_trace") or ""):
            functions[frame["function"]] += 1
    return (modules or functions or Counter(["unknown"])).most_common(1)[0][0]
