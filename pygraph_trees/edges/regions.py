"""Ranges of addresses: which one holds an address, and what is between two of them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable

Range = tuple[int, int]  # from the first address to the end
_LAST = 1 << 64


class Regions:
    """Ranges, sorted; those that overlap are one."""

    def __init__(self, ranges: Iterable[Range] = ()) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []
        for start, end in sorted(ranges):
            if self._ends and start < self._ends[-1]:
                self._ends[-1] = max(self._ends[-1], end)
            else:
                self._starts.append(start)
                self._ends.append(end)

    def holding(self, address: int) -> Range | None:
        """The range that an address is in."""
        at = bisect_right(self._starts, address) - 1
        return (self._starts[at], self._ends[at]) if at >= 0 and address < self._ends[at] else None

    def around(self, address: int) -> Range:
        """The gap that an address is in, if no range holds it."""
        at = bisect_right(self._starts, address)
        return self._ends[at - 1] if at else 0, self._starts[at] if at < len(self._starts) else _LAST

    def overlap(self, start: int, end: int) -> bool:
        """Whether one of the ranges overlaps this one."""
        return self.holding(start) is not None or self.around(start)[1] < end
