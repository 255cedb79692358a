"""Patches of ``torch._inductor.scheduler``: what ``graph_partition`` decided is described for the coverage report, and
what reads values of the CPU is no part of a CUDA graph."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from .patch import Patch, Rebind

_MODULE = "torch._inductor.scheduler"


def _graph_partition(upstream: Callable[..., Any]) -> Callable[..., Any]:
    from pygraph_trees.report import compiled

    @functools.wraps(upstream)
    def graph_partition(self: Any) -> Any:
        partitions, signatures = upstream(self)
        compiled.partitioned(self, partitions, signatures)
        return partitions, signatures

    return graph_partition


def _should_partition(upstream: Callable[..., Any]) -> Callable[..., Any]:
    from torch._inductor.scheduler import FusedSchedulerNode

    from pygraph_trees.placement.scheduled import why_outside

    @functools.wraps(upstream)
    def should_partition(self: Any, node: Any) -> Any:
        reason = upstream(self, node)
        # Of a fused node upstream asks this for each of its parts.
        return reason if isinstance(node, FusedSchedulerNode) else why_outside(node, reason)

    return should_partition


PATCHES: tuple[Patch, ...] = (
    Rebind(
        feature="placement",
        module=_MODULE,
        name="Scheduler.should_partition",
        replace=_should_partition,
        removable="torch keeps what reads values of the CPU out of CUDA graphs",
    ),
    Rebind(
        feature="coverage",
        module=_MODULE,
        name="Scheduler.graph_partition",
        replace=_graph_partition,
        removable="torch reports why it splits a graph as data",
    ),
)
