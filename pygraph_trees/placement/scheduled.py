"""What Inductor schedules for the GPU and reads a value of the CPU: outside of CUDA graphs, but for staged inputs.

A number of the CPU that a kernel reads is passed by value, and an operator may look at a tensor's content: a recording
would go on with what it was when it was recorded.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pygraph_trees.settings import Settings

from .staging import staged

if TYPE_CHECKING:
    import torch


_CROSS_DEVICE = "cross-device ops"  # as upstream says since 2.15


def keeping_outside(upstream: Callable[..., Any]) -> Callable[..., Any]:
    """``Scheduler.should_partition``, and :func:`why_outside`."""
    from torch._inductor.scheduler import FusedSchedulerNode

    @functools.wraps(upstream)
    def should_partition(self: Any, node: Any) -> Any:
        reason = upstream(self, node)
        # For a fused node upstream asks this of each of its parts.
        return reason if isinstance(node, FusedSchedulerNode) else why_outside(node, reason)

    return should_partition


def why_outside(node: Any, reason: str | None) -> str | None:
    """Why one of Inductor's scheduler nodes, which is not fused, cannot be part of a CUDA graph; None where it can.

    Args:
        reason: upstream's.
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
    """Of a buffer, an input or a constant of the graph that is being compiled."""
    from torch._inductor.virtualized import V

    if name in V.graph.constants:
        return V.graph.constants[name].device
    buffer = V.graph.try_get_buffer(name)
    return None if buffer is None else buffer.get_device()
