"""Patches of ``torch._inductor.scheduler``, which divides a graph into partitions.

``Scheduler.graph_partition`` also describes the partitions for the report, and ``Scheduler.should_partition`` also
keeps the kernels that read CPU values out of CUDA graphs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .patch import Patch, Rebind

_MODULE = "torch._inductor.scheduler"


def _graph_partition(upstream: Callable[..., Any]) -> Callable[..., Any]:
    from pygraph_trees.report.compiled import describing_partitions

    return describing_partitions(upstream)


def _should_partition(upstream: Callable[..., Any]) -> Callable[..., Any]:
    from pygraph_trees.placement.scheduled import keeping_outside

    return keeping_outside(upstream)


PATCHES: tuple[Patch, ...] = (
    Rebind(
        feature="placement",
        module=_MODULE,
        name="Scheduler.should_partition",
        replace=_should_partition,
        removable="torch keeps what reads values of the CPU out of CUDA graphs",
    ),
    Rebind(
        feature="report",
        module=_MODULE,
        name="Scheduler.graph_partition",
        replace=_graph_partition,
        removable="torch reports why it splits a graph as data",
    ),
)
