"""Corrects decisions of Inductor's scheduler about values of the CPU, moved or not.

GPU work that reads a CPU value stays outside of CUDA graphs, unless the value is staged: a recording would repeat the
value that it was recorded with. The functions take upstream's function and return the one to call instead.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from pygraph_trees.reasons import Reason
from pygraph_trees.settings import Settings

from .staging import staged

_CROSS_DEVICE = "cross-device ops"  # upstream's text since 2.15


def keeping_outside(upstream: Callable[..., Any]) -> Callable[..., Any]:
    """``Scheduler.should_partition``, which says why a node cannot be part of a CUDA graph; None if it can."""
    from torch._inductor import ir
    from torch._inductor.scheduler import FusedSchedulerNode

    @functools.wraps(upstream)
    def should_partition(self: Any, node: Any) -> Any:
        reason = upstream(self, node)
        if isinstance(node, FusedSchedulerNode):
            return reason  # upstream asks this of each of its parts
        if isinstance(node.node, ir.FallbackKernel) and node.node.op_overload is staged:
            return None if reason == _CROSS_DEVICE else reason
        asks = reason is None and Settings.current().placement != "off"
        return Reason.READS_CPU() if asks and any(_is_on_cpu(r.name) for r in node.read_writes.reads) else reason

    return should_partition


def keeping_producers_outside(upstream: Callable[..., Any]) -> Callable[..., Any]:
    """``ForeachKernelSchedulerNode.get_consumer_subnode_for``, but None for a producer that several parts read.

    Inductor would fuse the producer into one part, and the parts of a foreach kernel run in no order. A CPU value that
    the program also returns has such a producer once placement has moved it to the GPU.
    """

    @functools.wraps(upstream)
    def get_consumer_subnode_for(self: Any, producer: Any) -> Any:
        if Settings.current().placement != "off":
            names = {buffer.get_name() for buffer in producer.get_outputs()}
            reads = [any(read.name in names for read in part.read_writes.reads) for part in self.snodes]
            if sum(reads) > 1:
                return None
        return upstream(self, producer)

    return get_consumer_subnode_for


def _is_on_cpu(name: str) -> bool:
    """Whether a buffer, input or constant of the graph that is being compiled is on the CPU."""
    from torch._inductor.virtualized import V

    held, buffer = V.graph.constants.get(name), V.graph.try_get_buffer(name)
    device = held.device if held is not None else buffer and buffer.get_device()
    return getattr(device, "type", None) == "cpu"
