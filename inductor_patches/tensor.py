"""Patch of ``torch.Tensor``: own memory of outputs that another stream uses is not written again.

Torch's allocator only looks at the streams that a program records for a tensor when its memory is freed.
"""

from __future__ import annotations

from .patch import Patch, Rebind, made_by

PATCHES: tuple[Patch, ...] = (
    Rebind(
        feature="trees",
        module="torch",
        name="Tensor.record_stream",
        replace=made_by("pygraph_trees.trees.entry_points", "record_stream"),
        removable="torch tells which streams use a storage",
    ),
)
