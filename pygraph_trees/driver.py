"""The CUDA driver as this project uses it; the only file that calls ``cuda.bindings``.

:class:`Driver` is thin and typed: one method a call, handles are integers, a call that does not return success raises
:class:`DriverError` with the call and the code's name. It works on whatever module it is given, so that tests hand it a
fake. :func:`driver` gives the process's own, or None where ``cuda.bindings`` is not installed; callers then do without.
"""

from __future__ import annotations

import enum
import functools
import importlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

from .exc import PygraphError


class DriverError(PygraphError):
    template = "{call} returned {code}"


class NodeKind(enum.Enum):
    """What a node of a CUDA graph does; the names of ``CUgraphNodeType``."""

    KERNEL = "kernel"
    MEMCPY = "memcpy"
    MEMSET = "memset"
    HOST = "host"
    GRAPH = "graph"
    EMPTY = "empty"
    OTHER = "other"  # events, semaphores, allocations, conditionals, batched memory operations


class Driver:
    """The calls, over a module with the interface of ``cuda.bindings.driver``."""

    def __init__(self, api: Any) -> None:
        self._api = api
        types = api.CUgraphNodeType
        self._kinds = {
            int(getattr(types, f"CU_GRAPH_NODE_TYPE_{kind.name}")): kind
            for kind in NodeKind
            if kind is not NodeKind.OTHER
        }

    def _call(self, name: str, *args: Any) -> tuple[Any, ...]:
        code, *values = getattr(self._api, name)(*args)
        if int(code) != 0:
            raise DriverError(call=name, code=getattr(code, "name", str(code)))
        return tuple(values)

    def capturing_graph(self, stream: int) -> int | None:
        """The graph that is being captured on a stream, None where nothing is (``cuStreamGetCaptureInfo``)."""
        status, _, graph, *_ = self._call("cuStreamGetCaptureInfo", stream)
        active = self._api.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_ACTIVE
        return int(graph) if int(status) == int(active) else None

    def nodes(self, graph: int) -> list[int]:
        """All nodes of a graph, without those of its child graphs (``cuGraphGetNodes``)."""
        _, count = self._call("cuGraphGetNodes", graph, 0)
        if not count:
            return []
        nodes, _ = self._call("cuGraphGetNodes", graph, count)
        return [int(node) for node in nodes]

    def node_kind(self, node: int) -> NodeKind:
        (code,) = self._call("cuGraphNodeGetType", node)
        return self._kinds.get(int(code), NodeKind.OTHER)

    def child_graph(self, node: int) -> int:
        (graph,) = self._call("cuGraphChildGraphNodeGetGraph", node)
        return int(graph)

    def count_nodes(self, graph: int) -> Counter[NodeKind]:
        """How many nodes of each kind a graph has, those of child graphs included."""
        return Counter(self._all_kinds(graph))

    def _all_kinds(self, graph: int) -> Iterator[NodeKind]:
        for node in self.nodes(graph):
            kind = self.node_kind(node)
            if kind is NodeKind.GRAPH:
                yield from self._all_kinds(self.child_graph(node))
            else:
                yield kind


@functools.cache
def driver() -> Driver | None:
    """The driver of this process, None without ``cuda.bindings``."""
    try:
        return Driver(importlib.import_module("cuda.bindings.driver"))
    except ImportError:
        return None
