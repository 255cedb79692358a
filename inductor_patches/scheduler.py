"""Patch of ``torch._inductor.scheduler``: what ``graph_partition`` decided is described for the coverage report."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from .patch import Expectation, Fingerprint, Patch, Rebind

_MODULE = "torch._inductor.scheduler"


def _graph_partition(upstream: Callable[..., Any]) -> Callable[..., Any]:
    from pygraph_trees.coverage import compiled

    @functools.wraps(upstream)
    def graph_partition(self: Any) -> Any:
        partitions, signatures = upstream(self)
        compiled.partitioned(self, partitions, signatures)
        return partitions, signatures

    return graph_partition


PATCHES: tuple[Patch, ...] = (
    Rebind(
        feature="coverage",
        module=_MODULE,
        name="Scheduler.graph_partition",
        replace=_graph_partition,
        fingerprints=(
            Fingerprint(
                (2, 11),
                (2, 15),
                (
                    Expectation(
                        _MODULE,
                        "Scheduler.graph_partition",
                        ("self",),
                        ("partitions", "signatures", "should_partition"),
                    ),
                    Expectation(_MODULE, "Scheduler.should_partition", ("self", "node")),
                    Expectation(_MODULE, "Scheduler._codegen_partitions", ("self",), ("graph_partition",)),
                    Expectation(_MODULE, "GroupedSchedulerNode"),
                    Expectation(_MODULE, "NopKernelSchedulerNode"),
                    Expectation("torch._inductor.ir", "DeviceCopy"),
                    Expectation("torch._inductor.ir", "MultiOutput"),
                ),
            ),
        ),
        removable="torch reports why it splits a graph as data",
    ),
)
