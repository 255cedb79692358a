"""The address ranges of graph pools, and which pools this package's managers own."""

from __future__ import annotations

from typing import Any
from weakref import WeakValueDictionary

import torch

from pygraph_trees.indirection.pool import PoolRanges, segments_of

OWNED: WeakValueDictionary[Any, Any] = WeakValueDictionary()  # the managers of this package, by pool
_ranges: WeakValueDictionary[Any, PoolRanges] = WeakValueDictionary()  # by device and pool


def note_stream(tensor: torch.Tensor, stream: Any) -> None:
    """Lets replays of the pool that a tensor is in wait for another stream, which uses the tensor."""
    for manager in managers():
        if holds(manager, tensor.untyped_storage()):
            manager.note_use(tensor, stream.device_index, stream.stream_id)


def streams_that_use(pool: Any, storage: torch.UntypedStorage) -> list[torch.Stream]:
    """The streams that the program has named in this step for an output in a pool."""
    manager = OWNED.get(pool)
    return [] if manager is None else manager.streams_in_use(storage)


def managers() -> list[Any]:
    # A copy: another thread may make a manager meanwhile.
    return [manager for reference in OWNED.valuerefs() if (manager := reference()) is not None]


def holds(manager: Any, storage: torch.UntypedStorage) -> bool:
    is_there = storage.device == torch.device("cuda", manager.device_index)
    return bool(is_there and manager.pool.holds(storage.data_ptr()))


def ranges_of(device: int, pool: tuple[int, int]) -> PoolRanges:
    """The ranges of a pool, as long as its manager or a recording holds them.

    Its manager calls ``forget`` whenever the pool may have grown; none does outside of ``OWNED``.
    """
    if (found := _ranges.get((device, pool))) is None:
        made = PoolRanges(lambda: (segment for segment in segments_of(pool) if segment["device"] == device))
        found = _ranges.setdefault((device, pool), made)
    return found


def free_bytes(device: int, pool_bytes: int) -> int:
    """How much memory the process may still take on a GPU, for other uses than a pool; 0 if that is unknown."""
    try:
        free, total = torch.cuda.mem_get_info(device)
        allowed = torch.cuda.get_per_process_memory_fraction(device) * total
    except RuntimeError:
        return 0
    free = min(free, allowed - torch.cuda.memory_reserved(device))
    # Memory that torch has reserved counts as free, but not the pool's.
    reserve = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(free + max(0, reserve - pool_bytes))
