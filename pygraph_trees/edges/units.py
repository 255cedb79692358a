"""Units: the operations of a captured graph, in the captured order, with the memory that they access.

Every node of a graph is in one unit. A unit whose accesses are not all known must be a barrier. If an edge lets its
later node start early, both nodes belong to one unit. :class:`Regions` finds ranges of addresses, and gaps.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pygraph_trees.cuda.edges import Edge

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


@dataclass(frozen=True, slots=True)
class Access:
    """A read or a write of memory, from the first address to the end; a whole allocation, not a view of it."""

    start: int
    end: int
    write: bool

    def __post_init__(self) -> None:
        if self.start >= self.end:
            raise ValueError(f"an access from {self.start:#x} ends at {self.end:#x}; leave empty ones out")


@dataclass(frozen=True, slots=True)
class Unit:
    """An operation. A unit that reads and writes the same memory has an access for each."""

    nodes: tuple[int, ...]  # handles
    accesses: tuple[Access, ...] = ()
    barrier: bool = False  # keeps its place among all others
    lane: int = 0
    nbytes: int = 0  # of its tensors, as far as they are known


def joined(units: Sequence[Unit], edges: Iterable[Edge]) -> list[Unit]:
    """Merges units that an edge other than a full one connects, with all units in between.

    A joined unit is in the lane of its first part. Raises :class:`KeyError` if an edge has a node of no unit.
    """
    number = {node: i for i, unit in enumerate(units) for node in unit.nodes}
    until = list(range(len(units)))  # by unit: the last one that it is joined with
    for edge in edges:
        if not edge.is_full:
            first, last = sorted((number[edge.before], number[edge.after]))
            until[first] = max(until[first], last)
    found: list[Unit] = []
    begin = end = 0
    for i, last in enumerate(until):
        end = max(end, last)
        if i == end:
            parts = units[begin : i + 1]
            nodes = tuple(node for part in parts for node in part.nodes)
            accesses = tuple(access for part in parts for access in part.accesses)
            nbytes = sum(part.nbytes for part in parts)
            found.append(Unit(nodes, accesses, any(part.barrier for part in parts), parts[0].lane, nbytes))
            begin = end = i + 1
    return found
