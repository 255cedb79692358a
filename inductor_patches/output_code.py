"""Patches of ``torch._inductor.output_code``: the life of a compiled graph.

When a graph is made, it is described for the report, and its saved tensors are noted. When it is installed, it is
decided whether it is graphed. When it is called, the fast path is tried first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .patch import Patch, Rebind, made_by

_MODULE = "torch._inductor.output_code"


def _init(upstream: Callable[..., Any]) -> Callable[..., Any]:
    from pygraph_trees.report.compiled import describing
    from pygraph_trees.trees.saved_tensors import noting

    return noting(describing(upstream))


PATCHES: tuple[Patch, ...] = (
    Rebind(
        feature="report",
        module=_MODULE,
        name="CompiledFxGraph.__init__",
        replace=_init,
        removable="torch reports why it splits a graph as data",
    ),
    Rebind(
        feature="trees",
        module=_MODULE,
        name="CompiledFxGraph.post_compile",
        replace=made_by("pygraph_trees.trees.compiled_graph", "putting_to_use"),
        removable="never: this is the drop-in",
    ),
    Rebind(
        feature="trees",
        module=_MODULE,
        name="CompiledFxGraph.__call__",
        replace=made_by("pygraph_trees.trees.compiled_graph", "calling"),
        removable="never: this is the drop-in",
    ),
)
