"""Corrects decisions of Inductor's scheduler about values of the CPU, moved or not.

GPU work that reads a CPU value stays outside of CUDA graphs, unless the value is staged.
:func:`why_outside` takes one of Inductor's scheduler nodes and upstream's reason, and returns the reason for a split or
None. A kernel takes a CPU scalar by value, and an operator may look at a tensor's content: a recording would repeat the
value that it was recorded with.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pygraph_trees.settings import Settings

from .staging import staged

if TYPE_CHECKING:
    import torch


_CROSS_DEVICE = "cross-device ops"  # upstream's text since 2.15


def keeping_outside(upstream: Callable[..., Any]) -> Callable[..., Any]:
    """``Scheduler.should_partition``, and :func:`why_outside`."""
    from torch._inductor.scheduler import FusedSchedulerNode

    @functools.wraps(upstream)
    def should_partition(self: Any, node: Any) -> Any:
        reason = upstream(self, node)
        # For a fused node upstream asks this of each of its parts.
        return reason if isinstance(node, FusedSchedulerNode) else why_outside(node, reason)

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


def why_outside(node: Any, reason: str | None) -> str | None:
    """Says why an unfused scheduler node of Inductor cannot be part of a CUDA graph; None if it can.

    Args:
        reason: upstream's reason.
    """
    from torch._inductor import ir

    if isinstance(node.node, ir.FallbackKernel) and node.node.op_overload is staged:
        return None if reason == _CROSS_DEVICE else reason
    if reason is not None:
        return reason
    for read in node.read_writes.reads:
        device = _device_of(read.name)
        if device is not None and device.type == "cpu":
            return None if Settings.current().placement == "off" else "reads a value of the CPU"
    return None


def _device_of(name: str) -> torch.device | None:
    """The device of a buffer, input or constant of the graph that is being compiled."""
    from torch._inductor.virtualized import V

    if name in V.graph.constants:
        return V.graph.constants[name].device
    buffer = V.graph.try_get_buffer(name)
    return None if buffer is None else buffer.get_device()
