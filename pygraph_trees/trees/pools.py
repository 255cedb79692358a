"""The address ranges of graph pools, one :class:`~pygraph_trees.indirection.pool.PoolRanges` a pool."""

from __future__ import annotations

import functools
from typing import Any

import torch

from pygraph_trees.indirection.pool import PoolRanges


@functools.cache
def ranges_of(device: int, pool: tuple[int, int]) -> PoolRanges:
    """The ranges of a pool; a handle is never given out twice in a process."""
    return PoolRanges(lambda: _segments(device, pool))


def _segments(device: int, pool: tuple[int, int]) -> list[dict[str, Any]]:
    snapshot = torch.cuda.memory_snapshot(pool, include_traces=False)
    return [segment for segment in snapshot if segment["device"] == device]
