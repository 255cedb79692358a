"""An executor of graphs that lets nodes overlap as far as edges allow, and tears their writes.

A node reads when it starts and again when it ends. Of the cells that it writes, it spoils every other one when it
starts, and gives all a value when it ends: a hash of what it read. Whatever a node reads is kept, since many wrong
orders never show in the final memory.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from pygraph_trees.edges.units import Access


def cells(accesses: Iterable[Access], write: bool) -> list[int]:
    return sorted({cell for a in accesses if a.write == write for cell in range(a.start, a.end)})


@dataclass
class Outcome:
    """What nodes read, and what is in memory in the end; cells that nobody wrote have their own number."""

    memory: dict[int, int] = field(default_factory=dict)
    read: dict[int, tuple[list[int], list[int]]] = field(default_factory=dict)  # by node: at its start and end

    def start(self, node: int, accesses: Sequence[Access]) -> None:
        self.read[node] = (self._values(cells(accesses, False)), [])
        for cell in cells(accesses, True)[::2]:
            self.memory[cell] = -node

    def end(self, node: int, accesses: Sequence[Access]) -> None:
        written = cells(accesses, True)
        self.read[node][1].extend(self._values(cell for cell in cells(accesses, False) if cell not in written))
        for cell in written:
            self.memory[cell] = hash((node, cell, *map(tuple, self.read[node])))

    def _values(self, cells: Iterable[int]) -> list[int]:
        return [self.memory.get(cell, cell) for cell in cells]


def serial(effects: Mapping[int, Sequence[Access]]) -> Outcome:
    """One node after another, in the order of the mapping."""
    found = Outcome()
    for node, accesses in effects.items():
        found.start(node, accesses)
        found.end(node, accesses)
    return found


def interleaved(effects: Mapping[int, Sequence[Access]], edges: Iterable[tuple[int, int]], seed: int) -> Outcome:
    """Starts and ends nodes at random, each one after the ends of those from which edges lead to it."""
    chance, found = random.Random(seed), Outcome()
    waits, after = dict.fromkeys(effects, 0), {node: [] for node in effects}
    for earlier, later in edges:
        waits[later] += 1
        after[earlier].append(later)
    ready, running = [node for node in effects if not waits[node]], []
    while ready or running:
        index = chance.randrange(len(ready) + len(running))
        if index < len(ready):
            running.append(node := ready.pop(index))
            found.start(node, effects[node])
            continue
        node = running.pop(index - len(ready))
        found.end(node, effects[node])
        for later in after[node]:
            waits[later] -= 1
            if not waits[later]:
                ready.append(later)
    return found
