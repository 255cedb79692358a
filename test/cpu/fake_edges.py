"""Edges of the fake driver's graphs, by the calls of the driver's library that take data; arguments are ctypes objects.

A call that fails may have changed some of its edges: ``changed_before_failure`` of them. ``misadds`` makes the next
addition go wrong without an error: its last edge is "lost", or it is an "early" one.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from fake_calls import CUresult, FakeCalls

PROGRAMMATIC = 0x01_00_01  # CUgraphEdgeData: type, ports of the later and of the earlier node


class FakeEdges(FakeCalls):
    def __init__(self) -> None:
        super().__init__()
        self._graphs: dict[int, list[int]] = {}
        self._edges: dict[int, dict[tuple[int, int], int]] = {}
        self._streams: dict[int, tuple[Any, int]] = {}  # status and graph
        self._captured_last: dict[int, list[int]] = {}  # nodes by stream
        self.changed_before_failure = 0
        self.misadds: str | None = None

    def edges(self, graph: int) -> dict[tuple[int, int], int]:
        """The data of each edge by its nodes, in the order in which they were added."""
        return self._edges.setdefault(graph, {})

    def connect(self, graph: int, edges: Iterable[tuple[int, int, int]]) -> None:
        """Adds edges, given as nodes and data, without a call."""
        nodes = {*self._graphs[graph]}
        for before, after, data in edges:
            assert {before, after} <= nodes, f"{before:#x} or {after:#x} is in another graph"
            self.edges(graph)[before, after] = data

    def cuStreamUpdateCaptureDependencies_v2(self, stream: Any, nodes: Any, data: Any, count: Any, flags: Any) -> int:
        assert data is None and len(nodes) == count.value and flags.value == 1
        if (code := self._enter("cuStreamUpdateCaptureDependencies_v2")) == 0:
            assert self._streams[stream.value][1], "the stream captures nothing"
            self._captured_last[stream.value] = list(nodes)
        return code

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
        added = list(zip(before, after, data, strict=True))
        assert len(added) == count.value > 0
        if code := self._enter("cuGraphAddDependencies_v2"):
            added = added[: self.changed_before_failure]
        elif self.misadds:
            (*_, last), misadds, self.misadds = added, self.misadds, None
            added[-1:] = [] if misadds == "lost" else [(*last[:2], PROGRAMMATIC)]
        if len({edge[:2] for edge in added} - {*self.edges(graph.value)}) < len(added):
            return CUresult.CUDA_ERROR_INVALID_VALUE
        self.connect(graph.value, added)
        return code

    def cuGraphRemoveDependencies_v2(self, graph: Any, before: Any, after: Any, data: Any, count: Any) -> int:
        removed = list(zip(before, after, data, strict=True))
        assert len(removed) == count.value > 0
        code = self._enter("cuGraphRemoveDependencies_v2")
        for *nodes, kind in removed[: self.changed_before_failure] if code else removed:
            assert self.edges(graph.value).pop(tuple(nodes)) == kind
        return code
