"""An executor of graphs that lets nodes overlap as far as edges allow, and tears their writes.

A node reads when it starts and again when it ends. Of the cells that it writes, it spoils every other one when it
starts, and gives all a value when it ends: a hash of what it read. All that nodes read is kept, since many wrong orders
never show in the final memory.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from pygraph_trees.edges.units import Access


def cells(accesses: Sequence[Access], write: bool) -> list[int]:
    return sorted({cell for a in accesses if a.write == write for cell in range(a.start, a.end)})


@dataclass
class Outcome:
    memory: dict[int, int] = field(default_factory=dict)  # other cells hold their own number
    read: dict[int, list[list[int]]] = field(default_factory=dict)  # by node: at its start and at its end

    def start(self, node: int, accesses: Sequence[Access]) -> None:
        self.read[node] = [[self.memory.get(cell, cell) for cell in cells(accesses, False)]]
        self.memory |= dict.fromkeys(cells(accesses, True)[::2], -node)

    def end(self, node: int, accesses: Sequence[Access]) -> None:
        written = cells(accesses, True)
        self.read[node].append([self.memory.get(c, c) for c in cells(accesses, False) if c not in written])
        self.memory |= {cell: hash((node, cell, str(self.read[node]))) for cell in written}


def serial(effects: Mapping[int, Sequence[Access]]) -> Outcome:
    """One node after another, in the order of the mapping."""
    found = Outcome()
    for node, accesses in effects.items():
        found.start(node, accesses)
        found.end(node, accesses)
    return found


def interleaved(effects: Mapping[int, Sequence[Access]], edges: Iterable[tuple[int, int]], seed: int) -> Outcome:
    """Starts and ends nodes at random, each one after the ends of those from which edges lead to it."""
    chance, found, running = random.Random(seed), Outcome(), []
    waits = {node: {before for before, after in edges if after == node} for node in effects}
    while waits or running:
        node = chance.choice([node for node, before in waits.items() if not before] + running)
        if node in waits:
            del waits[node]
            running.append(node)
            found.start(node, effects[node])
        else:
            running.remove(node)
            found.end(node, effects[node])
            for before in waits.values():
                before.discard(node)
    return found


def is_right(effects: Mapping[int, Sequence[Access]], edges: Iterable[tuple[int, int]], seeds: range) -> bool:
    """Whether nodes read in each interleaving what they read one after another, and memory ends the same."""
    right = serial(effects)
    return all(interleaved(effects, edges, seed) == right for seed in seeds)
