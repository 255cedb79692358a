"""Patch of ``torch._dynamo.variables.optimizer``: whether a gradient is static for CUDA graphs.

Torch asserts that a recording is open, so an optimizer's step cannot be compiled after a backward that ran un-graphed.
If no recording is open, the replacement decides from the tensor alone.
"""

from __future__ import annotations

from .patch import Patch, Rebind, made_by

PATCHES: tuple[Patch, ...] = (
    Rebind(
        feature="trees",
        module="torch._dynamo.variables.optimizer",
        name="_is_static_for_cudagraphs",
        replace=made_by("pygraph_trees.trees.entry_points", "is_static_for_cudagraphs"),
        removable="torch does not assert that a recording is open",
    ),
)
