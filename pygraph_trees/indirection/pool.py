"""Which addresses are in a graph pool, from snapshots of the allocator.

A pool grows only when upstream warms up or records in it, and then :meth:`PoolRanges.forget` must be called. Until the
next ``forget`` the ranges of the last snapshot are valid, and :meth:`PoolRanges.holds` is a bisection. The first query
after a ``forget`` takes a snapshot.
"""

from __future__ import annotations

import bisect
import ctypes
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch

from pygraph_trees.native.binding import new_counter


class PoolRanges:
    """The address ranges of one graph pool. ``snapshot`` returns its segments, with ``address`` and ``total_size``."""

    __slots__ = ("__weakref__", "_ranges", "_snapshot", "counter")

    def __init__(self, snapshot: Callable[[], Iterable[dict[str, Any]]]) -> None:
        self._snapshot = snapshot
        self._ranges: list[tuple[int, int]] | None = None  # begin and end, in order
        self.counter = new_counter()  # of possible changes, which C++ reads too

    def forget(self) -> None:
        """Drops the snapshot, because the pool may have changed."""
        self._ranges = None
        self.counter.value += 1

    def holds(self, address: int) -> bool:
        ranges = self._look()
        position = bisect.bisect_right(ranges, (address, math.inf)) - 1
        return position >= 0 and address < ranges[position][1]

    def nbytes(self) -> int:
        return sum(end - begin for begin, end in self._look())

    def _look(self) -> list[tuple[int, int]]:
        if (ranges := self._ranges) is None:
            ranges = sorted((s["address"], s["address"] + s["total_size"]) for s in self._snapshot())
            self._ranges = ranges
        return ranges


def segments_of(pool: tuple[int, int]) -> list[dict[str, Any]]:
    """The segments of a graph pool.

    Up to torch 2.14, a snapshot releases references to its arguments that it does not own. Small integers survive that
    in Python 3.12; the id of pool 257 would be freed.
    """
    for number in (*pool, False):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(number))
    return torch.cuda.memory_snapshot(pool, include_traces=False)
