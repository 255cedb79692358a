"""The order of units, as sets and as edges.

:func:`reduced` is the transitive reduction of an order; :func:`missing` finds what the closure of given edges lacks.
Units are numbered in the captured order. A set of units is an integer whose bit i stands for unit i.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from graphlib import TopologicalSorter

Pair = tuple[int, int]  # (earlier, later): the earlier unit ends before the later one starts


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
    """For each unit that could start too early, one of the units that it must follow.

    If units follow all that :func:`conflicts` names, any two in conflict are in order. Raises :class:`ValueError` if
    the edges form a cycle.
    """
    ahead: dict[int, list[int]] = {unit: [] for unit in range(len(needs))}
    for earlier, later in pairs:
        ahead[later].append(earlier)
    before = [0] * len(needs)
    for unit in TopologicalSorter(ahead).static_order():
        for earlier in ahead[unit]:
            before[unit] |= before[earlier] | 1 << earlier
    lacking = (need & ~reached for need, reached in zip(needs, before, strict=True))
    return [(lack.bit_length() - 1, unit) for unit, lack in enumerate(lacking) if lack]
