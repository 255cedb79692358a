"""Patch of ``torch.cuda.CUDAGraph``: a graph that the program captures may read outputs of recordings.

It holds their addresses, so outputs in the graph pool, which later steps overwrite, are moved out before it begins.
"""

from __future__ import annotations

from .patch import Patch, Rebind, made_by

PATCHES: tuple[Patch, ...] = (
    Rebind(
        feature="trees",
        module="torch.cuda",
        name="CUDAGraph.capture_begin",
        replace=made_by("pygraph_trees.trees.captures", "capture_begin"),
        removable="torch lets other code know when a capture begins",
    ),
)
