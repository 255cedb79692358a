"""Edges of a captured graph, which can be read and replaced until it is instantiated, and those of its next node.

:class:`Dependencies` has one method per driver call. If one raises :class:`DriverError`, some edges may have changed.
It calls the driver's library itself: the bindings free the data of edges before they return it (NVIDIA/cuda-python
#1804). In the library, the calls with data end in ``_v2``, since CUDA 12.3; names in CUDA 13 leave that out.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

from pygraph_trees.errors import NOT_FOUND, DriverError, refused

_READ, _ADD, _REMOVE = "cuGraphGetEdges_v2", "cuGraphAddDependencies_v2", "cuGraphRemoveDependencies_v2"
_FOLLOW, _SET = "cuStreamUpdateCaptureDependencies_v2", 1  # CU_STREAM_SET_CAPTURE_DEPENDENCIES


@functools.cache
def dependencies() -> Dependencies | None:
    """The calls of this process's driver; None without its library."""
    try:
        return Dependencies(ctypes.CDLL("libcuda.so.1"))
    except OSError:
        return None


class Edge(NamedTuple):
    """An edge between two nodes, given by their handles."""

    before: int
    after: int
    data: int = 0  # the 8 bytes of CUgraphEdgeData: ports and type; 0 is a full edge

    @property
    def is_full(self) -> bool:
        """Whether the later node starts when the earlier one has ended; otherwise it may start, and waits by itself."""
        return not self.data


class Dependencies:
    """The driver's calls that read and change a graph's edges."""

    def __init__(self, library: Any) -> None:
        """``library`` is ``libcuda``, opened by :mod:`ctypes`, or has functions that take the same arguments."""
        self._library = library

    def read(self, graph: int) -> list[Edge]:
        """All edges of a graph, in any order."""
        count, handle = ctypes.c_size_t(), ctypes.c_void_p(graph)
        self._call(_READ, handle, None, None, None, ctypes.byref(count))
        if not count.value:
            return []
        arrays = tuple((ctypes.c_uint64 * count.value)() for _ in Edge._fields)
        self._call(_READ, handle, *arrays, ctypes.byref(count))
        return list(map(Edge, *arrays))

    def add(self, graph: int, edges: Sequence[Edge]) -> None:
        """Adds edges in this order. An edge that exists already is an error."""
        self._change(_ADD, graph, edges)

    def remove(self, graph: int, edges: Sequence[Edge]) -> None:
        """Removes edges. It is an error if one does not exist, or if a node of the graph allocates or frees memory."""
        self._change(_REMOVE, graph, edges)

    def make_stream(self) -> int:
        """Makes a stream of the current context that does not wait for the default stream; it is never destroyed."""
        stream = ctypes.c_void_p()
        self._call("cuStreamCreate", ctypes.byref(stream), ctypes.c_uint(1))  # CU_STREAM_NON_BLOCKING
        return stream.value or 0

    def follow(self, stream: int, nodes: Sequence[int]) -> None:
        """The next node that a capturing stream captures follows these, and no others."""
        array = (ctypes.c_uint64 * len(nodes))(*nodes)
        self._call(_FOLLOW, ctypes.c_void_p(stream), array, None, ctypes.c_size_t(len(nodes)), ctypes.c_uint(_SET))

    def _change(self, name: str, graph: int, edges: Sequence[Edge]) -> None:
        if edges:
            arrays = ((ctypes.c_uint64 * len(edges))(*column) for column in zip(*edges, strict=True))
            self._call(name, ctypes.c_void_p(graph), *arrays, ctypes.c_size_t(len(edges)))

    def _call(self, name: str, *args: Any) -> None:
        try:
            function = getattr(self._library, name)
        except AttributeError:
            raise DriverError(call=name, code=NOT_FOUND) from None
        if (code := function(*args)) != 0:
            raise refused(name, code)
