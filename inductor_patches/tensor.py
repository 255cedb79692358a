"""Patch of ``torch.Tensor``: replays overwrite no memory that a recorded stream may still use.

Torch's allocator looks at the streams that a program records for a tensor only when it frees the tensor's memory.
Replays write to memory that is not freed: own memory of outputs is then not written again, and the next replay of a
graph pool waits for the stream.
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
