"""Patches of ``torch.Tensor`` and its storage: replays overwrite no memory that others may still use.

Torch's allocator looks at the streams that a program records for a tensor only when it frees the tensor's memory.
Replays write to memory that is not freed: own memory of outputs is then not written again, and the next replay of a
graph pool waits for the stream. Outputs leave the pool before another process or a lazy clone shares their memory.
"""

from __future__ import annotations

from .patch import Patch, Rebind, made_by


def _first_moved(module: str, name: str, removable: str) -> Patch:
    replace = made_by("pygraph_trees.trees.entry_points", "outside_of_pools")
    return Rebind(feature="trees", module=module, name=name, replace=replace, removable=removable)


PATCHES: tuple[Patch, ...] = (
    Rebind(
        feature="trees",
        module="torch",
        name="Tensor.record_stream",
        replace=made_by("pygraph_trees.trees.entry_points", "record_stream"),
        removable="torch tells which streams use a storage",
    ),
    _first_moved("torch", "UntypedStorage._share_cuda_", "torch shares no memory of a graph pool"),
    _first_moved("torch", "_lazy_clone", "torch clones memory of a graph pool at once"),
    _first_moved("torch", "Tensor._lazy_clone", "torch clones memory of a graph pool at once"),
)
