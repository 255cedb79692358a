"""Patches of ``torch._inductor.scheduler``, which divides a graph into partitions.

``Scheduler.graph_partition`` also describes the partitions for the report, and ``Scheduler.should_partition`` also
keeps the kernels that read CPU values out of CUDA graphs.
"""

from __future__ import annotations

from .patch import Patch, Rebind, made_by

_MODULE = "torch._inductor.scheduler"


PATCHES: tuple[Patch, ...] = (
    Rebind(
        feature="placement",
        module=_MODULE,
        name="Scheduler.should_partition",
        replace=made_by("pygraph_trees.placement.scheduled", "keeping_outside"),
        removable="torch keeps what reads values of the CPU out of CUDA graphs",
    ),
    Rebind(
        feature="report",
        module=_MODULE,
        name="Scheduler.graph_partition",
        replace=made_by("pygraph_trees.report.compiled", "describing_partitions"),
        removable="torch reports why it splits a graph as data",
    ),
)
