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

    KERNEL = "kernel"
    MEMCPY = "memcpy"
    MEMSET = "memset"
    HOST = "host"
    GRAPH = "graph"
    EMPTY = "empty"
    WAIT_EVENT = "wait_event"
    EVENT_RECORD = "event_record"
    MEM_ALLOC = "mem_alloc"
    MEM_FREE = "mem_free"
    OTHER = "other"  # semaphores, conditionals, batched memory operations


class Layout:
    """Offset and size of each of a kernel's parameters in its block, in bytes."""

    def __init__(self, places: list[tuple[int, int]]) -> None:
        """Raises :class:`ValueError` if the parameters are not in order."""
        self._places = places
        self.nbytes = 0
        for i, (offset, nbytes) in enumerate(places):
            if offset < self.nbytes:
                raise ValueError(f"parameter {i} begins inside of another one")
            self.nbytes = offset + nbytes
        self.words = {offset: i for i, (offset, nbytes) in enumerate(places) if nbytes == 8}
        self._pointers: type[ctypes.Array[ctypes.c_uint64]] = ctypes.c_uint64 * len(places)

    def __len__(self) -> int:
        return len(self._places)

    def divides(self, offset: int) -> bool:
        """Whether the 8 bytes at an offset span several parameters."""
        return any(offset < begin < offset + 8 for begin, _ in self._places)

    def pointers_into(self, start: int) -> ctypes.Array[ctypes.c_uint64]:
        return self._pointers(*[start + offset for offset, _ in self._places])

    def copied_pointers(self, given: int) -> ctypes.Array[ctypes.c_uint64]:
        return self._pointers.from_buffer_copy(ctypes.string_at(given, 8 * len(self)))

    def read(self, given: int) -> bytes:
        """The block that the pointers at an address describe, with zeros in its gaps."""
        block = bytearray(self.nbytes)
        for (offset, nbytes), pointer in zip(self._places, self._pointers.from_address(given), strict=True):
            block[offset : offset + nbytes] = ctypes.string_at(pointer, nbytes)
        return bytes(block)


Layouts = dict[tuple[int, int], Layout]  # by a kernel's handles


class GraphNode:
    """A node of a captured graph, with its parameters for one instantiated graph."""

    kind: ClassVar[NodeKind]
    _get: ClassVar[str]
    _set: ClassVar[str]
    _in_context: ClassVar[bool] = True  # whether the setter takes the context

    def __init__(self, driver: Any, handle: int) -> None:
        """``driver``: a :class:`~pygraph_trees.cuda.driver.Driver`, which makes nodes."""
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
    """A kernel launch: change parameters with :meth:`word` or :meth:`take_from`, then call :meth:`set`."""

    kind = NodeKind.KERNEL
    _get, _set = "cuGraphKernelNodeGetParams", "cuGraphExecKernelNodeSetParams"
    _in_context = False
    nbytes: int  # of the parameters, at the offsets that the kernel sees

    def __init__(self, driver: Any, handle: int, layouts: Layouts) -> None:
        super().__init__(driver, handle)
        self.function, self.kernel = int(self._params.func), int(self._params.kern)  # one of them is 0
        self._layout: Layout | None = None  # None if the parameters are passed as one block
        self._pointers: ctypes.Array[ctypes.c_uint64] | None = None  # ours, once the struct points to it
        self._taken: list[int] = []  # parameters read from a table
        # The struct points to the node's memory, which is only read here.
        self._recorded = self._read_packed() if self._params.extra else self._read_plain(layouts)
        self.nbytes = len(self._recorded)

    def _read_packed(self) -> bytes:
        given = (ctypes.c_uint64 * 4).from_address(int(self._params.extra))  # two pairs in either order, then the end
        entries = {given[0]: given[1], given[2]: given[3]}
        if entries.keys() != {_BUFFER, _SIZE}:
            raise DriverError(call=self._get, code="unknown launch parameters")
        return ctypes.string_at(entries[_BUFFER], ctypes.c_uint64.from_address(entries[_SIZE]).value)

    def _read_plain(self, layouts: Layouts) -> bytes:
        self._given = given = int(self._params.kernelParams)
        key = self.function, self.kernel
        if (layout := layouts.get(key)) is None:
            layout = layouts[key] = self._driver.layout(*key)
        if bool(given) != bool(len(layout)):  # an unknown handle looks like one without parameters
            raise DriverError(call=self._get, code="parameters of unknown layout")
        self._layout = layout
        return layout.read(given) if given else b""

    @property
    def address(self) -> int:
        """Address of the struct that :meth:`set` gives to the driver; fixed while the node lives."""
        return int(self._params.getPtr())

    @functools.cached_property
    def block(self) -> ctypes.Array[ctypes.c_char]:
        """The parameters that :meth:`set` writes: a copy, to which the struct points from now on."""
        self._block = block = _aligned_block(self._recorded)  # an interrupt may come before the property is cached
        start = ctypes.addressof(block)
        if self._layout is None:
            self._nbytes = ctypes.c_size_t(self.nbytes)
            pairs = (_BUFFER, start, _SIZE, ctypes.addressof(self._nbytes), _END)
            self._point_to((ctypes.c_uint64 * 5)(*pairs))
        elif len(self._layout):
            pointers = self._layout.pointers_into(start)
            if self._pointers is not None:
                for parameter in self._taken:
                    pointers[parameter] = self._pointers[parameter]
            self._point_to(pointers)
        return block

    def _point_to(self, pointers: ctypes.Array[ctypes.c_uint64]) -> ctypes.Array[ctypes.c_uint64]:
        self._pointers = pointers
        setattr(self._params, "extra" if self._layout is None else "kernelParams", ctypes.addressof(pointers))
        return pointers

    def may_be_address(self, offset: int) -> bool:
        """Whether the 8 bytes at an offset may be one parameter, or part of one."""
        return self._layout is None or not self._layout.divides(offset)

    def is_word(self, offset: int) -> bool:
        """Whether the 8 bytes at an offset are known to be a parameter of their own."""
        return self._layout is not None and offset in self._layout.words

    def words(self) -> bytes:
        """The recorded parameters, padded with zeros to a multiple of 8 bytes."""
        return self._recorded.ljust(-(-self.nbytes // 8) * 8, b"\0")

    def word(self, offset: int) -> ctypes.c_uint64:
        """The 8 bytes at an offset of the parameters, in place: assign to ``value``."""
        return ctypes.c_uint64.from_buffer(self.block, offset)

    def pointer(self, parameter: int) -> ctypes.c_uint64:
        """Where the struct has the address of a parameter's bytes, in place; raises ValueError if it is none."""
        if self._layout is None or parameter >= len(self._layout):
            raise ValueError(f"the kernel has no parameter {parameter} of its own")
        pointers = self._pointers or self._point_to(self._layout.copied_pointers(self._given))  # the rest as recorded
        self._taken.append(parameter)
        return ctypes.c_uint64.from_buffer(pointers, 8 * parameter)

    def take_from(self, offset: int, table: ctypes.Array[ctypes.c_uint64], index: int) -> bool:
        """Makes :meth:`set` read a parameter from a shared table; False if it is no separate one of 8 bytes."""
        parameter = None if self._layout is None else self._layout.words.get(offset)
        if parameter is None:
            return False
        self.pointer(parameter).value = ctypes.addressof(table) + 8 * index
        self._table = table  # keeps the table alive, which the struct does not
        return True


def _aligned_block(content: bytes) -> ctypes.Array[ctypes.c_char]:
    """A copy at a multiple of 64 bytes, which CUtensorMap, the strictest parameter type, requires."""
    room = (ctypes.c_char * (len(content) + 63))()
    block = (ctypes.c_char * len(content)).from_buffer(room, -ctypes.addressof(room) % 64)
    block.raw = content
    return block
