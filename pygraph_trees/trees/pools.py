"""The address ranges of graph pools, and which pools this package's managers own.

:func:`ranges_of` returns the one :class:`~pygraph_trees.indirection.pool.PoolRanges` of a pool. The manager that owns
the pool must call its ``forget`` whenever the pool may have grown; nothing does so for pools outside of :data:`OWNED`.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from pygraph_trees.indirection.pool import PoolRanges

OWNED: set[Any] = set()  # the pools of all managers of this package


@functools.cache
def ranges_of(device: int, pool: tuple[int, int]) -> PoolRanges:
    """The ranges of a pool; a handle is never given out twice in a process."""
    return PoolRanges(lambda: _segments(device, pool))


def _segments(device: int, pool: tuple[int, int]) -> list[dict[str, Any]]:
    snapshot = torch.cuda.memory_snapshot(pool, include_traces=False)
    return [segment for segment in snapshot if segment["device"] == device]
