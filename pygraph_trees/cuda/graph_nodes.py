"""Nodes of a captured graph, with the parameters they were recorded with.

:class:`GraphNode` owns its parameters: change them in place, then :meth:`~GraphNode.set` writes them to one
instantiated graph, whose own parameters cannot be read back. The captured graph keeps the recorded ones, except after
:meth:`CopyNode.set_captured`.
"""

from __future__ import annotations

import ctypes
import enum
import functools
from typing import Any, ClassVar

from pygraph_trees.errors import DriverError

_END, _BUFFER, _SIZE = 0, 1, 2  # CU_LAUNCH_PARAM_END, CU_LAUNCH_PARAM_BUFFER_POINTER, CU_LAUNCH_PARAM_BUFFER_SIZE


class NodeKind(enum.Enum):
    """The kind of a CUDA graph node, by the names of ``CUgraphNodeType``."""

    KERNEL, MEMCPY, MEMSET, HOST, GRAPH, EMPTY, WAIT_EVENT, EVENT_RECORD, MEM_ALLOC, MEM_FREE = range(10)
    OTHER = 10  # semaphores, conditionals, batched memory operations


Layout = list[tuple[int, int]]  # offset and size in bytes of each of a kernel's parameters in its block, in order
Layouts = dict[tuple[int, int], Layout]  # by a kernel's handles


class GraphNode:
    """A node of a captured graph, with its parameters for one instantiated graph."""

    _get: ClassVar[str]
    _set: ClassVar[str]
    _in_context: ClassVar[bool] = True  # whether the setter takes the context

    def __init__(self, driver: Any, handle: int) -> None:
        """``driver``: a :class:`~pygraph_trees.cuda.driver.Driver`."""
        self.handle = handle
        self._driver = driver
        (self._params,) = driver.call(self._get, handle)

    def bind(self, exec_: int, context: Any) -> None:
        """Binds :meth:`set` to an instantiated graph of the node's graph, in the context of its device."""
        api = self._driver.api
        self._driver.find(self._set)  # raises if it is missing
        contexts = (context,) if self._in_context else ()
        self._args = (api.CUgraphExec(exec_), api.CUgraphNode(self.handle), self._params, *contexts)

    def set(self) -> None:
        """Writes the parameters to the bound graph, which is unchanged after an error; queued launches keep theirs."""
        self._driver.call(self._set, *self._args)


class KernelNode(GraphNode):
    """A kernel launch: change parameters with :meth:`word` or :meth:`pointer`, then call :meth:`set`."""

    _get, _set = "cuGraphKernelNodeGetParams", "cuGraphExecKernelNodeSetParams"
    _in_context = False
    nbytes: int  # of the parameters, at the offsets that the kernel sees

    def __init__(self, driver: Any, handle: int, layouts: Layouts | None = None) -> None:
        """``layouts`` are known. Raises :class:`DriverError` also if the kernel's own is unknown."""
        super().__init__(driver, handle)
        self.function, self.kernel = int(self._params.func), int(self._params.kern)  # one of them is 0
        self.layout: Layout | None = None  # None if the parameters are passed as one block
        # The struct points to the node's memory, which is only read here.
        layouts = {} if layouts is None else layouts
        self._recorded = self._read_packed() if self._params.extra else self._read_plain(layouts)
        self.nbytes = len(self._recorded)

    def _read_packed(self) -> bytes:
        given = (ctypes.c_uint64 * 4).from_address(int(self._params.extra))  # two pairs in either order, then the end
        entries = {given[0]: given[1], given[2]: given[3]}
        if entries.keys() != {_BUFFER, _SIZE}:
            raise DriverError(call=self._get, code="unknown launch parameters")
        return ctypes.string_at(entries[_BUFFER], ctypes.c_uint64.from_address(entries[_SIZE]).value)

    def _read_plain(self, layouts: Layouts) -> bytes:
        given, key = int(self._params.kernelParams), (self.function, self.kernel)
        if (layout := layouts.get(key)) is None:
            layout = layouts[key] = self._driver.layout(*key)
        if bool(given) != bool(layout):  # an unknown handle looks like one without parameters
            raise DriverError(call=self._get, code="parameters of unknown layout")
        self.layout = layout
        block = bytearray(sum(layout[-1]) if layout else 0)  # with zeros in its gaps
        for (offset, nbytes), pointer in zip(layout, (ctypes.c_uint64 * len(layout)).from_address(given), strict=True):
            block[offset : offset + nbytes] = ctypes.string_at(pointer, nbytes)
        return bytes(block)

    @property
    def address(self) -> int:
        """Address of the struct that :meth:`set` gives to the driver; fixed while the node lives."""
        return int(self._params.getPtr())

    @functools.cached_property
    def block(self) -> ctypes.Array[ctypes.c_char]:
        """The parameters that :meth:`set` writes: a copy, to which the struct points from now on."""
        self._block = block = _aligned_block(self._recorded)  # an interrupt may come before the property is cached
        start = ctypes.addressof(block)
        if self.layout is None:
            self._nbytes = ctypes.c_size_t(self.nbytes)
            self._pointers = (ctypes.c_uint64 * 5)(_BUFFER, start, _SIZE, ctypes.addressof(self._nbytes), _END)
            self._params.extra = ctypes.addressof(self._pointers)
        elif self.layout:
            self._pointers = (ctypes.c_uint64 * len(self.layout))(*(start + offset for offset, _ in self.layout))
            self._params.kernelParams = ctypes.addressof(self._pointers)
        return block

    def may_be_address(self, offset: int) -> bool:
        """Whether the 8 bytes at an offset may be one parameter, or part of one: they do not span several."""
        return not any(offset < begin < offset + 8 for begin, _ in self.layout or ())

    def is_word(self, offset: int) -> bool:
        """Whether the 8 bytes at an offset are known to be a parameter of their own."""
        return self.layout is not None and (offset, 8) in self.layout

    def words(self) -> bytes:
        """The recorded parameters, padded with zeros to a multiple of 8 bytes."""
        return self._recorded.ljust(-(-self.nbytes // 8) * 8, b"\0")

    def word(self, offset: int) -> ctypes.c_uint64:
        """The 8 bytes at an offset of the parameters, in place: assign to ``value``."""
        return ctypes.c_uint64.from_buffer(self.block, offset)

    def pointer(self, parameter: int) -> ctypes.c_uint64:
        """Where the struct has the address of a parameter's bytes, in place; raises ValueError if it is none."""
        if self.layout is None or parameter >= len(self.layout):
            raise ValueError(f"the kernel has no parameter {parameter} of its own")
        _ = self.block  # makes the pointers
        return ctypes.c_uint64.from_buffer(self._pointers, 8 * parameter)


def _aligned_block(content: bytes) -> ctypes.Array[ctypes.c_char]:
    """A copy at a multiple of 64 bytes, which CUtensorMap, the strictest parameter type, requires."""
    room = (ctypes.c_char * (len(content) + 63))()
    block = (ctypes.c_char * len(content)).from_buffer(room, -ctypes.addressof(room) % 64)
    block.raw = content
    return block
