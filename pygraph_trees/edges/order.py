"""The order of units that their memory requires, as sets and as edges.

Two units conflict if one writes what the other accesses, or if one is a barrier. Units are numbered in the captured
order. A set of units is an integer whose bit i stands for unit i.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Sequence
from graphlib import TopologicalSorter

from .units import Unit

Pair = tuple[int, int]  # (earlier, later): the earlier unit ends before the later one starts


def conflicts(units: Sequence[Unit]) -> list[int]:
    """For each unit, earlier units that it must follow. Together they imply the order of any two units in conflict.

    A unit follows the last writer of what it reads or writes; if it writes, all readers since, too.
    """
    memory, barrier = _Memory(), 0
    found = []
    for number, unit in enumerate(units):
        own = 1 << number
        if unit.barrier:
            needs = (own - 1) & -(barrier or 1)  # the units since the last barrier, and that one
            memory, barrier = _Memory(), own
        else:
            needs = barrier
            for access in unit.accesses:  # reads first, since a write hides earlier writers
                if not access.write:
                    needs |= memory.read(access.start, access.end, own)
            for access in unit.accesses:
                if access.write:
                    needs |= memory.write(access.start, access.end, own)
        found.append(needs & (own - 1))
    return found


class _Memory:
    """Memory as a row of regions without gaps, each with its last writer and the readers since, as sets."""

    def __init__(self) -> None:
        self._starts = [0]  # each region ends where the next one starts
        self._writer = [0]
        self._readers = [0]

    def read(self, start: int, end: int, unit: int) -> int:
        """Notes a reader; returns those that it must follow."""
        needs = 0
        for region in range(self._cut(start), self._cut(end)):
            needs |= self._writer[region]
            self._readers[region] |= unit
        return needs

    def write(self, start: int, end: int, unit: int) -> int:
        """Notes a writer, after which the memory is one region; returns those that it must follow."""
        needs = 0
        first, last = self._cut(start), self._cut(end)
        for region in range(first, last):
            needs |= self._writer[region] | self._readers[region]
        self._starts[first:last] = [start]
        self._writer[first:last] = [unit]
        self._readers[first:last] = [0]
        return needs

    def _cut(self, address: int) -> int:
        """The region that starts at an address, which is split off if there is none."""
        region = bisect_left(self._starts, address)
        if region == len(self._starts) or self._starts[region] != address:
            self._starts.insert(region, address)
            self._writer.insert(region, self._writer[region - 1])
            self._readers.insert(region, self._readers[region - 1])
        return region


def reduced(needs: Sequence[int]) -> list[Pair]:
    """The transitive reduction. ``needs`` has, for each unit, the earlier units that it must follow."""
    before: list[int] = []
    pairs = []
    for unit, rest in enumerate(needs):
        reached = 0
        while rest:
            latest = rest.bit_length() - 1  # no path to this unit leads through it and another one of the rest
            pairs.append((latest, unit))
            reached |= before[latest] | 1 << latest
            rest &= ~reached
        before.append(reached)
    return pairs


def missing(needs: Sequence[int], pairs: Collection[Pair]) -> list[Pair]:
    """For each unit that could start too early, one that it must follow. Raises ValueError if edges form a cycle."""
    ahead: dict[int, list[int]] = {unit: [] for unit in range(len(needs))}
    for earlier, later in pairs:
        ahead[later].append(earlier)
    before = [0] * len(needs)
    for unit in TopologicalSorter(ahead).static_order():
        for earlier in ahead[unit]:
            before[unit] |= before[earlier] | 1 << earlier
    lacking = (need & ~reached for need, reached in zip(needs, before, strict=True))
    return [(lack.bit_length() - 1, unit) for unit, lack in enumerate(lacking) if lack]
