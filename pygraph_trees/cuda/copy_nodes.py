"""Nodes of a captured graph that copy or fill memory, whose addresses the driver lets us change."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, ClassVar

from .graph_nodes import GraphNode

SOURCE, TARGET, HOST_SOURCE = 0, 8, 16  # the words of a memcpy node; a memset node has word 0


class _Field:
    """A word that is a field of a node's struct; a word in a kernel's parameters is a ``ctypes.c_uint64``."""

    def __init__(self, params: Any, name: str) -> None:
        self._set = functools.partial(setattr, params, name)

    value = property(fset=lambda self, address: self._set(address))


class CopyNode(GraphNode):
    """A node that the driver executes according to the kind of memory at its addresses, which instantiation fixes."""

    _set_captured: ClassVar[str]
    _fields: Mapping[int, str]  # names in the struct, by word

    def word(self, number: int) -> _Field:
        """An address in the parameters: assign to ``value``."""
        return _Field(self._params, self._fields[number])

    def set_captured(self) -> None:
        """Writes the current parameters to the captured graph, before it is instantiated."""
        self._driver.call(self._set_captured, self.handle, self._params)


class MemcpyNode(CopyNode):
    """A copy. ``source`` and ``target`` are recorded addresses of device memory: change the words, then :meth:`set`.

    A side is None, and must not be changed, if it is host memory or an array or if the copy is not ``plain``.
    ``host_source`` is None unless the source is host memory, which may be pageable.
    """

    _get, _set = "cuGraphMemcpyNodeGetParams", "cuGraphExecMemcpyNodeSetParams"
    _set_captured = "cuGraphMemcpyNodeSetParams"
    plain: bool  # one row and no offsets: the copies that the driver lets us change
    nbytes: int

    def __init__(self, driver: Any, handle: int) -> None:
        super().__init__(driver, handle)
        params, types = self._params, driver.api.CUmemorytype
        host, device = int(types.CU_MEMORYTYPE_HOST), int(types.CU_MEMORYTYPE_DEVICE)
        rows, layers = max(1, int(params.Height)), max(1, int(params.Depth))
        (from_type, source), (to_type, target) = self._side("src"), self._side("dst")
        offsets = (getattr(params, side + name) for side in ("src", "dst") for name in ("XInBytes", "Y", "Z", "LOD"))
        self.nbytes = int(params.WidthInBytes) * rows * layers
        self.plain = rows == layers == 1 and not any(offsets) and {from_type, to_type} <= {host, device}
        # The parameters may give memory that the driver knows by a host or a device address.
        host_field = "srcHost" if int(params.srcMemoryType) == host else "srcDevice"
        self._fields = {SOURCE: "srcDevice", TARGET: "dstDevice", HOST_SOURCE: host_field}
        self.source = source if self.plain and from_type == device else None
        self.target = target if self.plain and to_type == device else None
        self.host_source = source if from_type == host else None

    def _side(self, side: str) -> tuple[int, int]:
        """Memory type and address of "src" or "dst"."""
        types = self._driver.api.CUmemorytype
        kind = int(getattr(self._params, f"{side}MemoryType"))
        if kind == int(types.CU_MEMORYTYPE_HOST):
            return kind, int(getattr(self._params, f"{side}Host"))
        address = int(getattr(self._params, f"{side}Device"))
        return (self._driver.memory_type(address) if kind == int(types.CU_MEMORYTYPE_UNIFIED) else kind), address


class MemsetNode(CopyNode):
    """A fill. ``target`` is a recorded address of device memory: change word 0, then call :meth:`set`."""

    _get, _set = "cuGraphMemsetNodeGetParams", "cuGraphExecMemsetNodeSetParams"
    _set_captured = "cuGraphMemsetNodeSetParams"

    def __init__(self, driver: Any, handle: int) -> None:
        super().__init__(driver, handle)
        self._fields, self.target = {0: "dst"}, int(self._params.dst)
        self.plain = int(self._params.height) <= 1  # one row
