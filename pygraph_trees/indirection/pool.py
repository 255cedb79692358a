"""Which addresses are in a graph pool, from snapshots of the allocator.

A pool grows only when upstream warms up or records in it, and then :meth:`PoolRanges.forget` must be called. Until the
next ``forget`` the ranges of the last snapshot are valid, and :meth:`PoolRanges.holds` is a bisection. The first query
after a ``forget`` takes a snapshot.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable
from typing import Any

from pygraph_trees.native.binding import new_counter


class PoolRanges:
    """The address ranges of one graph pool.

    Args:
        snapshot: returns the pool's segments, with ``address`` and ``total_size`` in bytes.
    """

    __slots__ = ("__weakref__", "_ends", "_snapshot", "_starts", "counter")

    def __init__(self, snapshot: Callable[[], Iterable[dict[str, Any]]]) -> None:
        self._snapshot = snapshot
        self._starts: list[int] | None = None
        self._ends: list[int] = []
        self.counter = new_counter()  # of possible changes, which C++ reads too

    def forget(self) -> None:
        """Drops the snapshot, because the pool may have changed."""
        self._starts = None
        self.counter.value += 1

    def holds(self, address: int) -> bool:
        starts = self._starts if self._starts is not None else self._look()
        position = bisect.bisect_right(starts, address) - 1
        return position >= 0 and address < self._ends[position]

    def nbytes(self) -> int:
        starts = self._starts if self._starts is not None else self._look()
        return sum(self._ends) - sum(starts)

    def _look(self) -> list[int]:
        ranges = sorted((s["address"], s["address"] + s["total_size"]) for s in self._snapshot())
        self._ends = [end for _, end in ranges]
        self._starts = [start for start, _ in ranges]
        return self._starts
