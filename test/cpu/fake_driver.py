"""A CUDA driver that is not there, with the interface of ``cuda.bindings.driver``, which checks its callers.

:class:`FakeApi` holds graphs of nodes that a test builds. Calls return tuples that begin with a ``CUresult``, as the
real ones do. A handle that was never given out, an argument of the wrong type or a call on a stream in the wrong
state is an ``AssertionError``: the driver would crash or lie. :meth:`FakeApi.fail` makes the n-th next call of a name
return an error.
"""

from __future__ import annotations

import enum
import itertools
from collections import defaultdict


class CUresult(enum.IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED = 900


class CUgraphNodeType(enum.IntEnum):
    CU_GRAPH_NODE_TYPE_KERNEL = 0
    CU_GRAPH_NODE_TYPE_MEMCPY = 1
    CU_GRAPH_NODE_TYPE_MEMSET = 2
    CU_GRAPH_NODE_TYPE_HOST = 3
    CU_GRAPH_NODE_TYPE_GRAPH = 4
    CU_GRAPH_NODE_TYPE_EMPTY = 5
    CU_GRAPH_NODE_TYPE_WAIT_EVENT = 6
    CU_GRAPH_NODE_TYPE_CONDITIONAL = 13


class CUstreamCaptureStatus(enum.IntEnum):
    CU_STREAM_CAPTURE_STATUS_NONE = 0
    CU_STREAM_CAPTURE_STATUS_ACTIVE = 1
    CU_STREAM_CAPTURE_STATUS_INVALIDATED = 2


class FakeApi:
    CUresult = CUresult
    CUgraphNodeType = CUgraphNodeType
    CUstreamCaptureStatus = CUstreamCaptureStatus

    def __init__(self) -> None:
        self._handles = itertools.count(0x1000, 0x10)
        self._graphs: dict[int, list[int]] = {}
        self._nodes: dict[int, tuple[CUgraphNodeType, int | None]] = {}
        self._streams: dict[int, tuple[CUstreamCaptureStatus, int]] = {}
        self._failures: dict[str, list[int]] = defaultdict(list)
        self.calls: list[str] = []

    def make_stream(self) -> int:
        stream = next(self._handles)
        self._streams[stream] = (CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_NONE, 0)
        return stream

    def make_graph(self, *kinds: str, children: dict[int, int] | None = None) -> int:
        """A graph with nodes of the named kinds ("KERNEL"); ``children`` maps positions to child graphs."""
        graph = next(self._handles)
        self._graphs[graph] = []
        for position, kind in enumerate(kinds):
            node = next(self._handles)
            self._nodes[node] = (CUgraphNodeType[f"CU_GRAPH_NODE_TYPE_{kind}"], (children or {}).get(position))
            self._graphs[graph].append(node)
        return graph

    def capture(self, stream: int, graph: int, status: str = "ACTIVE") -> None:
        self._streams[stream] = (CUstreamCaptureStatus[f"CU_STREAM_CAPTURE_STATUS_{status}"], graph)

    def fail(self, call: str, after: int = 0) -> None:
        """The call named fails once, after so many more that succeed."""
        self._failures[call].append(after)

    def _enter(self, call: str) -> CUresult:
        self.calls.append(call)
        left = self._failures[call]
        for i in range(len(left)):
            left[i] -= 1
        if -1 in left:
            left.remove(-1)
            return CUresult.CUDA_ERROR_INVALID_VALUE
        return CUresult.CUDA_SUCCESS

    def cuStreamGetCaptureInfo(self, stream: int):
        assert isinstance(stream, int) and stream in self._streams, f"no stream {stream!r}"
        result = self._enter("cuStreamGetCaptureInfo")
        status, graph = self._streams[stream]
        # As in CUDA 13: status, id, graph, dependencies, edge data, number of dependencies.
        return result, status, 7, graph, [], [], 0

    def cuGraphGetNodes(self, graph: int, count: int):
        assert graph in self._graphs, f"no graph {graph!r}"
        nodes = self._graphs[graph]
        assert count in (0, len(nodes)), f"asked for {count} of {len(nodes)} nodes"
        result = self._enter("cuGraphGetNodes")
        return result, nodes[:count], len(nodes)

    def cuGraphNodeGetType(self, node: int):
        assert node in self._nodes, f"no node {node!r}"
        return self._enter("cuGraphNodeGetType"), self._nodes[node][0]

    def cuGraphChildGraphNodeGetGraph(self, node: int):
        kind, child = self._nodes[node]
        assert kind is CUgraphNodeType.CU_GRAPH_NODE_TYPE_GRAPH and child is not None, f"{node!r} is {kind.name}"
        return self._enter("cuGraphChildGraphNodeGetGraph"), child
