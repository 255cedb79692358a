"""Graph pools: the address ranges of each, one :class:`~pygraph_trees.indirection.pool.PoolRanges` a pool, and which
of them our managers own."""

from __future__ import annotations

import functools
from typing import Any

import torch

from pygraph_trees.indirection.pool import PoolRanges

OWNED: set[Any] = set()  # the pools of all our managers, which say when a pool grows


@functools.cache
def ranges_of(device: int, pool: tuple[int, int]) -> PoolRanges:
    """The ranges of a pool; a handle is never given out twice in a process."""
    return PoolRanges(lambda: _segments(device, pool))


def _segments(device: int, pool: tuple[int, int]) -> list[dict[str, Any]]:
    snapshot = torch.cuda.memory_snapshot(pool, include_traces=False)
    return [segment for segment in snapshot if segment["device"] == device]
