"""Nodes of a captured graph that copy or fill memory, whose addresses the driver lets us change."""

from __future__ import annotations

from typing import Any, ClassVar

from .graph_nodes import GraphNode, NodeKind


class CopyNode(GraphNode):
    """A node that the driver executes according to the kind of memory at its addresses, which instantiation fixes."""

    _set_captured: ClassVar[str]

    def set_captured(self) -> None:
        """Writes the current parameters to the captured graph, before it is instantiated."""
        self._driver.call(self._set_captured, self.handle, self._params)


class MemcpyNode(CopyNode):
    """A copy. ``source`` and ``target`` are addresses of device memory: assign to them, then call :meth:`set`.

    A side is None, and must not be assigned, if it is host memory or an array or if the copy is not ``plain``.
    ``host_source`` is None unless the source is host memory, which may be pageable.
    """

    kind = NodeKind.MEMCPY
    _get, _set = "cuGraphMemcpyNodeGetParams", "cuGraphExecMemcpyNodeSetParams"
    _set_captured = "cuGraphMemcpyNodeSetParams"
    plain: bool  # one row and no offsets: the copies that the driver lets us change
    nbytes: int

    def __init__(self, driver: Any, handle: int) -> None:
        super().__init__(driver, handle)
        params, types = self._params, driver.api.CUmemorytype
        host, device = int(types.CU_MEMORYTYPE_HOST), int(types.CU_MEMORYTYPE_DEVICE)
        rows, layers = max(1, int(params.Height)), max(1, int(params.Depth))
        (from_type, _), (to_type, _) = self._side("src"), self._side("dst")
        offsets = (getattr(params, side + name) for side in ("src", "dst") for name in ("XInBytes", "Y", "Z", "LOD"))
        self.nbytes = int(params.WidthInBytes) * rows * layers
        self.plain = rows == layers == 1 and not any(offsets) and {from_type, to_type} <= {host, device}
        # The parameters may give memory that the driver knows by a host or a device address.
        self._host_field = "srcHost" if int(params.srcMemoryType) == host else "srcDevice"
        self._from_host = from_type == host
        self._from_device = self.plain and from_type == device
        self._to_device = self.plain and to_type == device

    def _side(self, side: str) -> tuple[int, int]:
        """Memory type and address of "src" or "dst"."""
        types = self._driver.api.CUmemorytype
        kind = int(getattr(self._params, f"{side}MemoryType"))
        if kind == int(types.CU_MEMORYTYPE_HOST):
            return kind, int(getattr(self._params, f"{side}Host"))
        address = int(getattr(self._params, f"{side}Device"))
        return (self._driver.memory_type(address) if kind == int(types.CU_MEMORYTYPE_UNIFIED) else kind), address

    @property
    def source(self) -> int | None:
        return int(self._params.srcDevice) if self._from_device else None

    @source.setter
    def source(self, address: int | None) -> None:
        self._params.srcDevice = address

    @property
    def host_source(self) -> int | None:
        return int(getattr(self._params, self._host_field)) if self._from_host else None

    @host_source.setter
    def host_source(self, address: int | None) -> None:
        setattr(self._params, self._host_field, address)

    @property
    def target(self) -> int | None:
        return int(self._params.dstDevice) if self._to_device else None

    @target.setter
    def target(self, address: int | None) -> None:
        self._params.dstDevice = address


class MemsetNode(CopyNode):
    """A fill. ``target`` is an address of device memory: assign to it, then call :meth:`set`."""

    kind = NodeKind.MEMSET
    _get, _set = "cuGraphMemsetNodeGetParams", "cuGraphExecMemsetNodeSetParams"
    _set_captured = "cuGraphMemsetNodeSetParams"
    plain: bool  # one row
    nbytes: int  # from the first byte to the last, gaps between rows included

    def __init__(self, driver: Any, handle: int) -> None:
        super().__init__(driver, handle)
        params = self._params
        rows = max(1, int(params.height))
        self.plain = rows == 1
        self.nbytes = int(params.width) * int(params.elementSize) + int(params.pitch) * (rows - 1)

    @property
    def target(self) -> int:
        return int(self._params.dst)

    @target.setter
    def target(self, address: int) -> None:
        self._params.dst = address
