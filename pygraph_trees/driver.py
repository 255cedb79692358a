"""The CUDA driver as this project uses it; the only file that calls ``cuda.bindings``.

:class:`Driver` is thin and typed: one method a call, handles and addresses are integers, sizes are bytes. A call that
does not return success raises :class:`DriverError` with the call and the code's name; one that the bindings or the
installed driver lack raises it with :data:`NOT_FOUND`. It works on whatever module it is given, so that tests hand it a
fake. :func:`driver` gives the process's own, or None where ``cuda.bindings`` is not installed; callers then do without.

A :class:`GraphNode` is a node of a captured graph with the parameters that it was recorded with. They are ours: change
them in place, then :meth:`~GraphNode.set` makes one instantiated graph hold them. What such a graph holds cannot be
read back. The captured graph keeps its own, but for :meth:`CopyNode.set_captured`.

:meth:`Driver.search` reads all kernels of a graph at once. It is written in C (``native.c``), and is there where the
package was installed with a compiler at hand; elsewhere callers read node by node. Measured with these bindings over a
library that answers at once: 306 kernels, 3 of them with an input, in 0.4 instead of 3.5 ms, 84 with 30 in 0.4 instead
of 1.2.
"""

from __future__ import annotations

import contextlib
import ctypes
import enum
import functools
import importlib
import itertools
import struct
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from .exc import PygraphError

NOT_FOUND = "NOT_FOUND"

# What indirection calls, by the driver version that it needs: what the bindings 12.8 to 13.5 ask cuGetProcAddress for.
# They have functions that the installed driver lacks, so a name in them proves nothing.
_NEEDED = {
    10020: (
        *("cuMemAddressReserve", "cuMemCreate", "cuMemRelease", "cuMemMap", "cuMemUnmap"),
        *("cuMemSetAccess", "cuMemGetAllocationGranularity", "cuPointerGetAttribute", "cuCtxGetCurrent"),
        *("cuGraphMemcpyNodeGetParams", "cuGraphMemsetNodeGetParams"),
        *("cuGraphMemcpyNodeSetParams", "cuGraphMemsetNodeSetParams"),
        *("cuGraphExecMemcpyNodeSetParams", "cuGraphExecMemsetNodeSetParams"),
    ),
    12000: ("cuGraphKernelNodeGetParams", "cuGraphExecKernelNodeSetParams"),
    12040: ("cuFuncGetParamInfo", "cuKernelGetParamInfo"),
}

_END, _BUFFER, _SIZE = 0, 1, 2  # CU_LAUNCH_PARAM_END, CU_LAUNCH_PARAM_BUFFER_POINTER, CU_LAUNCH_PARAM_BUFFER_SIZE


class DriverError(PygraphError):
    template = "{call} returned {code}"


class _InvalidValue(DriverError):
    """What some calls answer to a good question: there is no such thing."""


class NodeKind(enum.Enum):
    """What a node of a CUDA graph does; the names of ``CUgraphNodeType``."""

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
    """Where a kernel's parameters lie in its block, by offset and size of each, in bytes."""

    def __init__(self, places: list[tuple[int, int]]) -> None:
        """Raises :class:`ValueError` where they are not in order."""
        self.offsets = tuple(offset for offset, _ in places)
        self.nbytes = 0
        self.words = {offset: i for i, (offset, nbytes) in enumerate(places) if nbytes == 8}
        # Parameters without gaps between them: how many bytes to leave out, the first one, where each lies from there.
        self._runs: list[tuple[int, int, list[int]]] = []
        self._sizes = tuple(nbytes for _, nbytes in places)
        self._words = struct.Struct(f"{len(places)}Q")
        self._pointers: type[ctypes.Array[ctypes.c_uint64]] = ctypes.c_uint64 * len(places)
        for i, (offset, nbytes) in enumerate(places):
            if offset < self.nbytes:
                raise ValueError(f"parameter {i} begins inside of another one")
            if offset > self.nbytes or not self._runs:
                self._runs.append((offset - self.nbytes, i, [0]))
            else:
                _, first, ahead = self._runs[-1]
                ahead.append(offset - self.offsets[first])
            self.nbytes = offset + nbytes

    def pointers_into(self, start: int) -> ctypes.Array[ctypes.c_uint64]:
        """The addresses of the parameters of a block."""
        return self._pointers.from_buffer_copy(self._words.pack(*[start + offset for offset in self.offsets]))

    def read(self, given: int) -> bytes:
        """The block with what the pointers at an address point to, zeros between; mostly it lies there in one piece."""
        pointers: tuple[int, ...] = self._words.unpack(ctypes.string_at(given, 8 * len(self.offsets)))
        parts = []
        for gap, first, ahead in self._runs:
            last = first + len(ahead) - 1
            begin = pointers[first]
            if gap:
                parts.append(bytes(gap))
            if [pointer - begin for pointer in pointers[first : last + 1]] == ahead:
                parts.append(ctypes.string_at(begin, ahead[-1] + self._sizes[last]))
            else:
                parts += map(ctypes.string_at, pointers[first : last + 1], self._sizes[first : last + 1])
        return parts[0] if len(parts) == 1 else b"".join(parts)


Layouts = dict[tuple[int, int], Layout]  # by a kernel's handles


@dataclass(frozen=True, slots=True)
class KernelHits:
    """A kernel node with words that were searched for."""

    position: int  # in the graph
    function: int  # the kernel's handles, one of them 0
    kernel: int
    block: bytes | None  # the parameters; None where they cannot be read
    words: list[tuple[int, int]]  # offset in the parameters and value


@dataclass(frozen=True, slots=True)
class Search:
    """What a graph's kernels hold of a range of addresses."""

    nodes: list[tuple[int, NodeKind]]  # handle and kind of all nodes, in the graph's order
    kernels: list[tuple[int, int]]  # handles of each kernel, once
    found: list[KernelHits]
    layouts: Layouts  # of kernels in ``found``


class Driver:
    """The calls, over a module with the interface of ``cuda.bindings.driver``."""

    def __init__(self, api: Any, native: Any = None, library: str = "libcuda.so.1") -> None:
        """``native``: the module written in C, which calls the driver's library by itself."""
        self._api = api
        self._native = native
        self._library = library
        names = {kind: f"CU_GRAPH_NODE_TYPE_{kind.name}" for kind in NodeKind if kind is not NodeKind.OTHER}
        self._kinds = {int(getattr(api.CUgraphNodeType, name)): kind for kind, name in names.items()}
        self._success = api.CUresult.CUDA_SUCCESS

    def _find(self, name: str) -> Any:
        try:
            return getattr(self._api, name)
        except AttributeError:
            raise DriverError(call=name, code=NOT_FOUND) from None

    def _call(self, name: str, *args: Any) -> tuple[Any, ...]:
        try:
            code, *values = self._find(name)(*args)
        except RuntimeError as error:  # how the bindings say that the driver, or this function of it, is not there
            raise DriverError(call=name, code=NOT_FOUND) from error
        if code != 0:
            raise _refused(name, code)
        return tuple(values)

    def missing_calls(self) -> list[str]:
        """What indirection calls and the bindings or the installed driver lack."""
        try:
            (version,) = self._call("cuDriverGetVersion")
        except DriverError:
            version = 0
        return [c for since, calls in _NEEDED.items() for c in calls if version < since or not hasattr(self._api, c)]

    def capturing_graph(self, stream: int) -> int | None:
        """The graph that is being captured on a stream, None where nothing is (``cuStreamGetCaptureInfo``)."""
        status, _, graph, *_ = self._call("cuStreamGetCaptureInfo", stream)
        active = self._api.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_ACTIVE
        return int(graph) if int(status) == int(active) else None

    def context(self) -> Any:
        """The current context, as :meth:`GraphNode.bind` takes it; nodes cannot be asked for theirs below CUDA 13.2."""
        (context,) = self._call("cuCtxGetCurrent")
        return context

    def nodes(self, graph: int) -> list[int]:
        """All nodes of a graph, without those of its child graphs (``cuGraphGetNodes``)."""
        _, count = self._call("cuGraphGetNodes", graph, 0)
        if not count:
            return []
        nodes, _ = self._call("cuGraphGetNodes", graph, count)
        return [int(node) for node in nodes]

    def search(self, graph: int, low: int, high: int) -> Search | None:
        """Words in [low, high) among the parameters of all kernels, at multiples of 4; None without the native part."""
        if self._native is None:
            return None
        try:
            nodes, kernels, found = self._native.search(self._library, graph, low, high)
        except RuntimeError as error:
            call, code = error.args
            raise DriverError(call=call, code=NOT_FOUND if code < 0 else code) from error
        except OSError as error:
            raise DriverError(call=self._library, code=NOT_FOUND) from error
        kinds = self._kinds
        layouts: Layouts = {}
        needed = {(function, kernel) for _, function, kernel, block, _ in found if block is not None}
        for function, kernel, places in kernels:
            if places is not None and (function, kernel) in needed:
                with contextlib.suppress(ValueError):  # :meth:`kernel_node` will say so
                    layouts[function, kernel] = Layout(places)
        return Search(
            [(handle, kinds.get(code, NodeKind.OTHER)) for handle, code in nodes],
            [(function, kernel) for function, kernel, _ in kernels],
            [
                KernelHits(position, function, kernel, block, words or [])
                for position, function, kernel, block, words in found
            ],
            layouts,
        )

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

    def kernel_node(self, node: int, layouts: Layouts | None = None, block: bytes | None = None) -> KernelNode:
        """Raises :class:`DriverError` also where the layout of the kernel's parameters cannot be told.

        Args:
            layouts: those that were asked for already, of kernels whose module is still loaded.
            block: the node's parameters, where they were read already.
        """
        return KernelNode(self, node, {} if layouts is None else layouts, block)

    def memcpy_node(self, node: int) -> MemcpyNode:
        return MemcpyNode(self, node)

    def memset_node(self, node: int) -> MemsetNode:
        return MemsetNode(self, node)

    def function_name(self, function: int, kernel: int) -> str | None:
        """A kernel's mangled name, by the handle that is not 0 (``cuFuncGetName``); None where it cannot be told."""
        call, handle = ("cuFuncGetName", function) if function else ("cuKernelGetName", kernel)
        try:
            (name,) = self._call(call, handle)
        except DriverError:
            return None
        return bytes(name).decode(errors="replace")

    def granularity(self, device: int) -> int:
        """What sizes and addresses of memory that is mapped must be multiples of."""
        minimum = self._api.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        (nbytes,) = self._call("cuMemGetAllocationGranularity", self._memory_on(device), minimum)
        return int(nbytes)

    def reserve(self, nbytes: int) -> int:
        """The start of a new range of addresses without memory, where the driver likes."""
        (address,) = self._call("cuMemAddressReserve", nbytes, 0, 0, 0)
        return int(address)

    def create_memory(self, nbytes: int, device: int) -> int:
        """Physical memory without an address."""
        (memory,) = self._call("cuMemCreate", nbytes, self._memory_on(device), 0)
        return int(memory)

    def release_memory(self, memory: int) -> None:
        """Gives up the handle; the memory lives on until it is mapped nowhere."""
        self._call("cuMemRelease", memory)

    def map_memory(self, address: int, nbytes: int, memory: int) -> None:
        """Puts the first ``nbytes`` of memory at a reserved address; the same memory may be at many."""
        self._call("cuMemMap", address, nbytes, 0, memory, 0)

    def allow_access(self, address: int, nbytes: int, device: int) -> None:
        """Lets a device read and write a range of whole mappings without gaps."""
        # A location is a bare pointer into its owner: the owner must live until the location was copied.
        access, memory = self._api.CUmemAccessDesc(), self._memory_on(device)
        access.location = memory.location
        access.flags = self._api.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        self._call("cuMemSetAccess", address, nbytes, [access], 1)

    def unmap(self, address: int, nbytes: int) -> None:
        """Takes the memory from a range of whole mappings without gaps."""
        self._call("cuMemUnmap", address, nbytes)

    def _memory_on(self, device: int) -> Any:
        api = self._api
        properties = api.CUmemAllocationProp()
        properties.type = api.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.location.type = api.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        properties.location.id = device
        return properties

    def _memory_type(self, address: int) -> int:
        """Which ``CUmemorytype`` lies at a unified address."""
        attribute = self._api.CUpointer_attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE
        try:
            (kind,) = self._call("cuPointerGetAttribute", attribute, address)
        except _InvalidValue:  # memory that the driver does not know: pageable, of the host
            kind = self._api.CUmemorytype.CU_MEMORYTYPE_HOST
        return int(kind)

    def _layout(self, function: int, kernel: int) -> Layout:
        """The call that counts the parameters needs CUDA 13.2: this asks until refused."""
        call, handle = ("cuFuncGetParamInfo", function) if function else ("cuKernelGetParamInfo", kernel)
        ask = self._find(call)
        places: list[tuple[int, int]] = []
        try:
            for index in itertools.count():
                code, *place = ask(handle, index)
                if code is not self._success and code != 0:
                    break
                places.append((place[0], place[1]))
        except RuntimeError as error:
            raise DriverError(call=call, code=NOT_FOUND) from error
        if not isinstance(_refused(call, code), _InvalidValue):
            raise _refused(call, code)  # an exception that a frame holds, and holds that frame, keeps graphs alive
        try:
            return Layout(places)
        except ValueError:
            raise DriverError(call=call, code="parameters in disorder") from None


class GraphNode:
    """A node of a captured graph, and its parameters for one instantiated graph."""

    kind: ClassVar[NodeKind]
    _get: ClassVar[str]
    _set: ClassVar[str]
    _in_context: ClassVar[bool] = True  # whether the setter takes the context

    def __init__(self, driver: Driver, handle: int) -> None:
        self.handle = handle
        self._driver = driver
        (self._params,) = driver._call(self._get, handle)

    def bind(self, exec_: int, context: Any) -> None:
        """Aims :meth:`set` at an instantiated graph of the node's graph, once; the context is its device's."""
        api = self._driver._api
        self._function = self._driver._find(self._set)
        contexts = (context,) if self._in_context else ()
        self._args = (api.CUgraphExec(exec_), api.CUgraphNode(self.handle), self._params, *contexts)

    def set(self) -> None:
        """Makes the bound graph hold the parameters as they are now; launches already queued keep theirs.

        0.2 µs and the driver's own time. Raises :class:`DriverError`, and then the graph holds what it held.
        """
        try:
            code = self._function(*self._args)[0]
        except RuntimeError as error:
            raise DriverError(call=self._set, code=NOT_FOUND) from error
        if code is not self._driver._success and code != 0:
            raise _refused(self._set, code)


class KernelNode(GraphNode):
    """A kernel's launch: write its parameters by :meth:`word` or :meth:`take_from`, then :meth:`set`."""

    kind = NodeKind.KERNEL
    _get, _set = "cuGraphKernelNodeGetParams", "cuGraphExecKernelNodeSetParams"
    _in_context = False
    nbytes: int  # of the parameters, at the offsets that the kernel sees

    def __init__(self, driver: Driver, handle: int, layouts: Layouts, block: bytes | None = None) -> None:
        super().__init__(driver, handle)
        self.function, self.kernel = int(self._params.func), int(self._params.kern)  # one of them is 0
        self._layout: Layout | None = None  # None where they are passed in one piece
        self._block: ctypes.Array[ctypes.c_char] | None = None  # what is written to, once something is
        # The struct points to memory of the node, which is read here and not written to.
        self._recorded = self._read_packed() if self._params.extra else self._read_plain(layouts, block)
        self.nbytes = len(self._recorded)

    def _read_packed(self) -> bytes:
        given = (ctypes.c_uint64 * 4).from_address(int(self._params.extra))  # two pairs in either order, then the end
        entries = {given[0]: given[1], given[2]: given[3]}
        if entries.keys() != {_BUFFER, _SIZE}:
            raise DriverError(call=self._get, code="unknown launch parameters")
        return ctypes.string_at(entries[_BUFFER], _word(entries[_SIZE]))

    def _read_plain(self, layouts: Layouts, block: bytes | None) -> bytes:
        given = int(self._params.kernelParams)
        key = self.function, self.kernel
        layout = layouts.get(key)
        if layout is None:
            layout = layouts[key] = self._driver._layout(*key)
        count = len(layout.offsets)
        if bool(given) != bool(count):  # a handle that the driver does not know looks like no parameters
            raise DriverError(call=self._get, code="parameters of unknown layout")
        self._layout = layout
        if block is not None:
            return block
        return layout.read(given) if count else b""

    @property
    def block(self) -> ctypes.Array[ctypes.c_char]:
        """The parameters as :meth:`set` gives them."""
        return self._own()

    def _own(self) -> ctypes.Array[ctypes.c_char]:
        """Memory of ours, which the struct points to from now on. Most nodes are only read and do without."""
        if self._block is None:
            self._block = _aligned_block(self._recorded)
            start = ctypes.addressof(self._block)
            if self._layout is None:
                self._nbytes = ctypes.c_size_t(self.nbytes)
                pairs = (_BUFFER, start, _SIZE, ctypes.addressof(self._nbytes), _END)
                self._pointers = (ctypes.c_uint64 * 5)(*pairs)
                self._params.extra = ctypes.addressof(self._pointers)
            else:
                self._pointers = self._layout.pointers_into(start)
                self._params.kernelParams = ctypes.addressof(self._pointers) if self._layout.offsets else 0
        return self._block

    def bind(self, exec_: int, context: Any) -> None:
        self._own()
        super().bind(exec_, context)

    def words(self) -> bytes:
        """The parameters as they were recorded, zeros up to a multiple of 8 bytes added."""
        return self._recorded.ljust(-(-self.nbytes // 8) * 8, b"\0")

    def word(self, offset: int) -> ctypes.c_uint64:
        """The 8 bytes at an offset of the parameters, in place: assign to ``value``."""
        return ctypes.c_uint64.from_buffer(self.block, offset)

    def take_from(self, offset: int, table: ctypes.Array[ctypes.c_uint64], index: int) -> bool:
        """From now on :meth:`set` takes the parameter at an offset from a table that nodes share, not from the block.

        False, and nothing is changed, where no parameter of 8 bytes is passed by itself there.
        """
        parameter = None if self._layout is None else self._layout.words.get(offset)
        if parameter is None:
            return False
        self._own()
        self._pointers[parameter] = ctypes.addressof(table) + 8 * index
        self._table = table  # the struct holds nothing
        return True


class CopyNode(GraphNode):
    """A node that the driver itself carries out, by the kind of memory that it finds at the addresses.

    The kind is fixed where the graph is instantiated: an address in memory that was mapped piece by piece
    (``cuMemMap``) cannot become one from ``cuMemAlloc`` or the reverse (measured, driver 580).
    """

    _set_captured: ClassVar[str]

    def set_captured(self) -> None:
        """Makes the captured graph hold the parameters as they are now, before it is instantiated."""
        self._driver._call(self._set_captured, self.handle, self._params)


class MemcpyNode(CopyNode):
    """A copy. ``source`` and ``target`` are addresses of device memory: assign to them, then :meth:`set`.

    A side is None, and must not be assigned to, where it is host memory or an array or where the copy is not ``plain``.
    """

    kind = NodeKind.MEMCPY
    _get, _set = "cuGraphMemcpyNodeGetParams", "cuGraphExecMemcpyNodeSetParams"
    _set_captured = "cuGraphMemcpyNodeSetParams"
    plain: bool  # one row, and nothing is added to the addresses: what the driver lets change
    nbytes: int
    host_source: int | None  # the address of a source in host memory, pageable memory included

    def __init__(self, driver: Driver, handle: int) -> None:
        super().__init__(driver, handle)
        params, types = self._params, driver._api.CUmemorytype
        host, device = int(types.CU_MEMORYTYPE_HOST), int(types.CU_MEMORYTYPE_DEVICE)
        rows, layers = max(1, int(params.Height)), max(1, int(params.Depth))
        (from_type, source), (to_type, _) = self._side("src"), self._side("dst")
        offsets = (getattr(params, side + name) for side in ("src", "dst") for name in ("XInBytes", "Y", "Z", "LOD"))
        self.nbytes = int(params.WidthInBytes) * rows * layers
        self.plain = rows == layers == 1 and not any(offsets) and {from_type, to_type} <= {host, device}
        self.host_source = source if from_type == host else None
        self._from_device = self.plain and from_type == device
        self._to_device = self.plain and to_type == device

    def _side(self, side: str) -> tuple[int, int]:
        """Memory type and address of "src" or "dst"."""
        types = self._driver._api.CUmemorytype
        kind = int(getattr(self._params, f"{side}MemoryType"))
        if kind == int(types.CU_MEMORYTYPE_HOST):
            return kind, int(getattr(self._params, f"{side}Host"))
        address = int(getattr(self._params, f"{side}Device"))
        return (self._driver._memory_type(address) if kind == int(types.CU_MEMORYTYPE_UNIFIED) else kind), address

    @property
    def source(self) -> int | None:
        return int(self._params.srcDevice) if self._from_device else None

    @source.setter
    def source(self, address: int | None) -> None:
        self._params.srcDevice = address

    @property
    def target(self) -> int | None:
        return int(self._params.dstDevice) if self._to_device else None

    @target.setter
    def target(self, address: int | None) -> None:
        self._params.dstDevice = address


class MemsetNode(CopyNode):
    """A fill. ``target`` is an address of device memory: assign to it, then :meth:`set`."""

    kind = NodeKind.MEMSET
    _get, _set = "cuGraphMemsetNodeGetParams", "cuGraphExecMemsetNodeSetParams"
    _set_captured = "cuGraphMemsetNodeSetParams"
    plain: bool  # one row
    nbytes: int  # from the first byte to the last, what lies between rows included

    def __init__(self, driver: Driver, handle: int) -> None:
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


def _refused(call: str, code: Any) -> DriverError:
    name = getattr(code, "name", str(code))
    return (_InvalidValue if name == "CUDA_ERROR_INVALID_VALUE" else DriverError)(call=call, code=name)


def _word(address: int) -> int:
    return ctypes.c_uint64.from_address(address).value


def _aligned_block(content: bytes) -> ctypes.Array[ctypes.c_char]:
    """A copy at a multiple of 64, which a CUtensorMap, the strictest parameter, asks for."""
    room = (ctypes.c_char * (len(content) + 63))()
    block = (ctypes.c_char * len(content)).from_buffer(room, -ctypes.addressof(room) % 64)
    block.raw = content
    return block


@functools.cache
def driver() -> Driver | None:
    """The driver of this process, None without ``cuda.bindings``."""
    try:
        api = importlib.import_module("cuda.bindings.driver")
    except ImportError:
        return None
    try:
        native = importlib.import_module("pygraph_trees._native")
    except ImportError:
        native = None
    return Driver(api, native)
