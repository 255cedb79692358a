"""Edges of the fake driver's graphs, by the calls of the driver's library that take data; arguments are ctypes objects.

A test connects nodes with :meth:`FakeEdges.connect`. A call that fails may have changed some of its edges, as many as
``changed_before_failure`` says. ``loses_an_edge`` makes the next addition forget its last edge without an error.
"""

from __future__ import annotations

import graphlib
from collections.abc import Iterable
from typing import Any

from fake_calls import CUresult, FakeCalls

PROGRAMMATIC = 0x01_00_01  # CUgraphEdgeData: type, ports of the later and of the earlier node


class FakeEdges(FakeCalls):
    def __init__(self) -> None:
        super().__init__()
        self._graphs: dict[int, list[int]] = {}
        self._edges: dict[int, dict[tuple[int, int], int]] = {}  # data by nodes, in the order of addition
        self.changed_before_failure = 0
        self.loses_an_edge = False

    def connect(self, graph: int, edges: Iterable[tuple[int, int, int]]) -> None:
        """Adds edges, given as nodes and data, without a call."""
        for before, after, data in edges:
            assert {before, after} <= {*self._graphs[graph]} and (before, after) not in self.edges(graph)
            self._edges[graph][before, after] = data

    def edges(self, graph: int) -> dict[tuple[int, int], int]:
        """The data of each edge by its nodes, in the order in which they were added."""
        return self._edges.setdefault(graph, {})

    def order(self, graph: int) -> list[int]:
        """The nodes in an order that the edges allow. A cycle is an ``AssertionError``."""
        sorter = graphlib.TopologicalSorter({node: [] for node in self._graphs[graph]})
        for before, after in self.edges(graph):
            sorter.add(after, before)
        try:
            return list(sorter.static_order())
        except graphlib.CycleError as error:
            raise AssertionError(f"a cycle: {error.args[1]}") from None

    def cuGraphGetEdges_v2(self, graph: Any, before: Any, after: Any, data: Any, count: Any) -> int:
        edges = [(*nodes, kind) for nodes, kind in reversed(self.edges(graph.value).items())]
        if (code := self._enter("cuGraphGetEdges_v2")) == 0:
            arrays = [array for array in (before, after, data) if array is not None]
            assert len(arrays) in (0, 3) and all(len(array) == len(edges) == count._obj.value for array in arrays)
            for array, column in zip(arrays, zip(*edges, strict=True), strict=False):
                array[:] = column
            count._obj.value = len(edges)
        return code

    def cuGraphAddDependencies_v2(self, graph: Any, before: Any, after: Any, data: Any, count: Any) -> int:
        return self._change("cuGraphAddDependencies_v2", graph, before, after, data, count)

    def cuGraphRemoveDependencies_v2(self, graph: Any, before: Any, after: Any, data: Any, count: Any) -> int:
        return self._change("cuGraphRemoveDependencies_v2", graph, before, after, data, count)

    def _change(self, call: str, graph: Any, *args: Any) -> int:
        *arrays, count = args
        assert all(len(array) == count.value > 0 for array in arrays), args
        edges, adds = self.edges(graph.value), "Add" in call
        todo = list(zip(*arrays, strict=True))
        if code := self._enter(call):
            todo = todo[: self.changed_before_failure]
        elif adds and self.loses_an_edge:
            self.loses_an_edge = False
            todo.pop()
        for before, after, data in todo:
            assert {before, after} <= {*self._graphs[graph.value]}, f"{before:#x} or {after:#x} is in another graph"
            if adds == ((before, after) in edges) or (not adds and edges[before, after] != data):
                return CUresult.CUDA_ERROR_INVALID_VALUE
            if adds:
                edges[before, after] = data
            else:
                del edges[before, after]
        return code
