"""Replaces the edges of a captured graph before it is instantiated.

:meth:`Chain.replace` reads the edges back, and compares what they imply with the units' conflicts. If anything fails,
the graph gets its captured edges back and :class:`NotReplaced` is raised; :class:`GraphLost` if that fails too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from pygraph_trees.cuda.edges import Dependencies, Edge
from pygraph_trees.errors import DriverError, PygraphError

from .order import Pair, conflicts, missing
from .units import Unit, joined


class NotReplaced(PygraphError):
    template = "the graph keeps its captured edges: {why}"


class GraphLost(PygraphError):
    template = "the edges of the graph are not known, and it must not be used: {why}"


class Chain:
    """A captured graph whose units run one after another, as captured."""

    def __init__(self, calls: Dependencies, graph: int, nodes: Sequence[int], units: Sequence[Unit]) -> None:
        """``units`` are in the captured order. Raises :class:`NotReplaced` if they are no chain of these nodes."""
        self.graph = graph
        self._calls, self._captured = calls, calls.read(graph)
        given = Counter(node for unit in units for node in unit.nodes)
        if given != Counter(nodes):
            raise NotReplaced(why=f"its {len(nodes)} nodes are not those of {len(units)} units")
        self.units = joined(units, self._captured)
        self.needs = conflicts(self.units)
        self._unit = {node: i for i, unit in enumerate(self.units) for node in unit.nodes}
        inside = self._inside(self._captured)
        self._follows, self._leads = {edge.after for edge in inside}, {edge.before for edge in inside}
        # By unit: the nodes that start first, and those that end last.
        self._heads = [[node for node in unit.nodes if node not in self._follows] for unit in self.units]
        self._tails = [[node for node in unit.nodes if node not in self._leads] for unit in self.units]
        if not {(i - 1, i) for i in range(1, len(self.units))} <= {*self._pairs(self._captured)}:
            raise NotReplaced(why="its units do not run one after another")

    def replace(self, pairs: Iterable[Pair]) -> None:
        """Gives the graph full edges between these pairs of units, in this order; can be called repeatedly."""
        try:
            self._exchange(
                Edge(before, after)
                for earlier, later in pairs
                for before in self._tails[earlier]
                for after in self._heads[later]
            )
            found = self._calls.read(self.graph)
            if self._inside(found) != self._inside(self._captured):
                raise NotReplaced(why="edges inside a unit have changed")
            if early := missing(self.needs, self._pairs(found)):
                raise NotReplaced(why=f"unit {early[0][1]} could start before unit {early[0][0]} has ended")
        except BaseException as error:
            self.restore(error)
            if isinstance(error, (DriverError, ValueError)):
                raise NotReplaced(why=error) from error
            raise

    def restore(self, why: object = "it is not replaced") -> None:
        """Gives the graph its captured edges again. Raises :class:`GraphLost` if that fails."""
        try:
            self._exchange(filter(self._is_between, self._captured))
            if set(self._calls.read(self.graph)) == set(self._captured):
                return
        except DriverError as error:
            raise GraphLost(why=f"{why}; then {error}") from error
        raise GraphLost(why=f"{why}; then other edges were read than were captured")

    def _exchange(self, edges: Iterable[Edge]) -> None:
        self._calls.remove(self.graph, list(filter(self._is_between, self._calls.read(self.graph))))
        self._calls.add(self.graph, list(edges))

    def _is_between(self, edge: Edge) -> bool:
        return self._unit[edge.before] != self._unit[edge.after]

    def _inside(self, edges: Iterable[Edge]) -> set[Edge]:
        return {edge for edge in edges if not self._is_between(edge)}

    def _pairs(self, edges: Iterable[Edge]) -> list[Pair]:
        """The pairs of units in which a full edge leads from each tail of the first to each head of the second."""
        found = Counter(
            (self._unit[edge.before], self._unit[edge.after])
            for edge in edges
            if edge.is_full and edge.before not in self._leads and edge.after not in self._follows
        )
        return [(a, b) for (a, b), count in found.items() if count == len(self._tails[a]) * len(self._heads[b])]
