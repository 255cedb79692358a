"""The CUDA driver's calls; no other file calls ``cuda.bindings``.

:class:`Driver` has one method per call: handles and addresses are integers, sizes are bytes. A failed call raises
:class:`DriverError` with the names of the call and the code, which is :data:`NOT_FOUND` if the bindings or the
installed driver lack the call.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import importlib
import itertools
import warnings
from collections import Counter
from collections.abc import Iterator
from typing import Any

from pygraph_trees.errors import NOT_FOUND, DriverError, InvalidValue, PygraphWarning, refused

from .graph_nodes import Layout, NodeKind

# The newest calls that indirection makes: a driver of CUDA 12.4 has all others, too. The bindings define functions that
# the installed driver lacks, so a name in them proves nothing.
_NEEDED, _SINCE = ("cuFuncGetParamInfo", "cuKernelGetParamInfo"), 12040
KERNEL_SETTER, CONTEXT_GETTER = "cuGraphExecKernelNodeSetParams_v2", "cuCtxGetCurrent"  # in the driver's library


class Driver:
    """The driver's calls, through a module with the interface of ``cuda.bindings.driver``."""

    def __init__(self, api: Any, library: str | None = None) -> None:
        """``library``: the name of the library that ``api`` calls, which C++ calls too."""
        self.api = api
        self.is_there = True  # whether the bindings find the driver's library
        self._library = library
        names = {kind: f"CU_GRAPH_NODE_TYPE_{kind.name}" for kind in NodeKind if kind is not NodeKind.OTHER}
        self._kinds = {int(getattr(api.CUgraphNodeType, name)): kind for kind, name in names.items()}
        self.value_kernels: dict[tuple[int, int], Any] = {}  # see value_kernel.py

    def find(self, name: str) -> Any:
        try:
            return getattr(self.api, name)
        except AttributeError:
            raise DriverError(call=name, code=NOT_FOUND) from None

    def call(self, name: str, *args: Any) -> tuple[Any, ...]:
        if not self.is_there:
            raise DriverError(call=name, code=NOT_FOUND)
        try:
            code, *values = self.find(name)(*args)
        except RuntimeError as error:  # how the bindings report a missing driver or function
            raise DriverError(call=name, code=NOT_FOUND) from error
        if code != 0:
            raise refused(name, code)
        return tuple(values)

    def version(self) -> int:
        """The latest CUDA version that the driver supports, 13000 for 13.0 (``cuDriverGetVersion``); 0 if unknown."""
        with contextlib.suppress(DriverError):
            return int(self.call("cuDriverGetVersion")[0])
        return 0

    def missing_calls(self) -> list[str]:
        """The calls that indirection needs and the bindings or the installed driver lack."""
        is_old = self.version() < _SINCE
        return [call for call in _NEEDED if is_old or not hasattr(self.api, call)]

    def begin_capture(self, stream: int) -> None:
        """Begins a capture in thread-local mode (``cuStreamBeginCapture``)."""
        self.call("cuStreamBeginCapture", stream, self.api.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)

    def end_capture(self, stream: int) -> None:
        """Ends a capture and destroys its graph (``cuStreamEndCapture``)."""
        (graph,) = self.call("cuStreamEndCapture", stream)
        self.call("cuGraphDestroy", graph)

    def capturing_graph(self, stream: int) -> int | None:
        """The graph that a stream is capturing; None if it captures nothing (``cuStreamGetCaptureInfo``)."""
        status, _, graph, *_ = self.call("cuStreamGetCaptureInfo", stream)
        active = self.api.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_ACTIVE
        return int(graph) if int(status) == int(active) else None

    def captured_last(self, stream: int) -> list[int]:
        """The nodes after which the next one of a capturing stream comes; one after a launch."""
        call = "cuStreamGetCaptureInfo"  # in bindings of CUDA 12, this is the call that refuses edges with data
        _, _, _, nodes, *_ = self.call(f"{call}_v3" if hasattr(self.api, f"{call}_v3") else call, stream)
        return [int(node) for node in nodes]

    def context(self) -> Any:
        """The current context, for :meth:`GraphNode.bind`; a node can name its own only since CUDA 13.2."""
        return self.call("cuCtxGetCurrent")[0]

    def enter(self, context: Any) -> Any:
        """Makes a context current, without which some calls crash; returns the one to go back to, if any."""
        current = self.context()
        if int(current) == int(context):
            return None
        self.call("cuCtxSetCurrent", context)
        return current if int(current) else None

    def nodes(self, graph: int) -> list[int]:
        """All nodes of a graph, without those of its child graphs (``cuGraphGetNodes``)."""
        _, count = self.call("cuGraphGetNodes", graph, 0)
        return [int(node) for node in self.call("cuGraphGetNodes", graph, count)[0]] if count else []

    def address_of(self, name: str) -> int | None:
        """Address of a function of the driver's library; None if it or the library is missing."""
        with contextlib.suppress(OSError, AttributeError):
            if self._library is not None:
                return ctypes.cast(getattr(ctypes.CDLL(self._library), name), ctypes.c_void_p).value
        return None

    def node_kind(self, node: int) -> NodeKind:
        return self._kinds.get(int(self.call("cuGraphNodeGetType", node)[0]), NodeKind.OTHER)

    def count_nodes(self, graph: int) -> Counter[NodeKind]:
        """The number of nodes of each kind in a graph, child graphs included."""
        counts, todo = Counter[NodeKind](), [graph]
        while todo:
            for node in self.nodes(todo.pop()):
                if (kind := self.node_kind(node)) is NodeKind.GRAPH:
                    todo.append(int(self.call("cuGraphChildGraphNodeGetGraph", node)[0]))
                else:
                    counts[kind] += 1
        return counts

    def function_name(self, function: int, kernel: int) -> str | None:
        """A kernel's mangled name, by the handle that is not 0 (``cuFuncGetName``); None if it is unknown."""
        call, handle = ("cuFuncGetName", function) if function else ("cuKernelGetName", kernel)
        with contextlib.suppress(DriverError):
            return bytes(self.call(call, handle)[0]).decode(errors="replace")
        return None

    def granularity(self, device: int) -> int:
        """The unit of sizes and addresses of mapped memory, in bytes."""
        minimum = self.api.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        return int(self.call("cuMemGetAllocationGranularity", self._memory_on(device), minimum)[0])

    def reserve(self, nbytes: int) -> int:
        """Reserves a range of addresses without memory, placed by the driver; returns its start."""
        return int(self.call("cuMemAddressReserve", nbytes, 0, 0, 0)[0])

    def create_memory(self, nbytes: int, device: int) -> int:
        """Creates physical memory without an address."""
        return int(self.call("cuMemCreate", nbytes, self._memory_on(device), 0)[0])

    def release_memory(self, memory: int) -> None:
        """Gives up the handle; the memory stays until its last mapping is gone."""
        self.call("cuMemRelease", memory)

    def map_memory(self, address: int, nbytes: int, memory: int) -> None:
        """Maps the first ``nbytes`` of memory at a reserved address; memory may be mapped many times."""
        self.call("cuMemMap", address, nbytes, 0, memory, 0)

    def allow_access(self, address: int, nbytes: int, device: int) -> None:
        """Lets a device read and write a range of whole mappings without gaps."""
        # A location is a bare pointer into its owner, which must live until the location is copied.
        access, memory = self.api.CUmemAccessDesc(), self._memory_on(device)
        access.location = memory.location
        access.flags = self.api.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        self.call("cuMemSetAccess", address, nbytes, [access], 1)

    def unmap(self, address: int, nbytes: int) -> None:
        """Removes the memory from a range of whole mappings without gaps."""
        self.call("cuMemUnmap", address, nbytes)

    @contextlib.contextmanager
    def without_disturbing_captures(self) -> Iterator[None]:
        """Keeps this thread's calls that may wait from breaking a capture of any thread."""
        relaxed = self.find("CUstreamCaptureMode").CU_STREAM_CAPTURE_MODE_RELAXED
        (before,) = self.call("cuThreadExchangeStreamCaptureMode", relaxed)
        try:
            yield
        finally:
            self.call("cuThreadExchangeStreamCaptureMode", before)

    def overwrite_stack(self) -> None:
        """Writes zeros to the 128 KiB of this thread's stack below the caller, where earlier calls left data."""
        _ignore()(_OnStack())

    def _memory_on(self, device: int) -> Any:
        properties = self.api.CUmemAllocationProp()
        properties.type = self.api.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.location.type = self.api.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        properties.location.id = device
        return properties

    def memory_type(self, address: int) -> int:
        """The ``CUmemorytype`` of the memory at a unified address."""
        attribute = self.api.CUpointer_attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE
        try:
            return int(self.call("cuPointerGetAttribute", attribute, address)[0])
        except InvalidValue:  # memory that the driver does not know: pageable host memory
            return int(self.api.CUmemorytype.CU_MEMORYTYPE_HOST)

    def layout(self, function: int, kernel: int) -> Layout:
        """Asks for one parameter after another until the driver refuses: the call that counts them needs CUDA 13.2."""
        call, handle = ("cuFuncGetParamInfo", function) if function else ("cuKernelGetParamInfo", kernel)
        ask = self.find(call)
        layout: Layout = []
        end = 0
        try:
            for index in itertools.count():
                code, *place = ask(handle, index)
                if code != 0:
                    break
                if place[0] < end:
                    raise DriverError(call=call, code="parameters in disorder")
                layout.append((place[0], place[1]))
                end = sum(place)
        except RuntimeError as error:
            raise DriverError(call=call, code=NOT_FOUND) from error
        if not isinstance(refused(call, code), InvalidValue):
            raise refused(call, code)  # an exception kept by a frame, and keeping that frame, keeps graphs alive
        return layout


class _OnStack(ctypes.Structure):
    """Zeros; as an argument that is passed by value they are copied to the stack."""

    _fields_ = (("zeros", ctypes.c_char * (128 << 10)),)


@functools.cache
def _ignore() -> Any:
    function = ctypes.CDLL(None).getpid
    function.argtypes = [_OnStack]
    return function


@functools.cache
def driver() -> Driver | None:
    """The driver of this process; None without ``cuda.bindings``."""
    was_on = gc.isenabled()
    gc.disable()  # loading the library holds a lock; a finalizer that calls the driver would wait for it forever
    try:
        made = Driver(importlib.import_module("cuda.bindings.driver"), "libcuda.so.1")
        made.is_there = made.version() > 0  # without the library, the bindings would search for it at each call
        return made
    except ImportError:
        return None
    finally:
        if was_on:
            gc.enable()


class IndirectionOff(PygraphWarning):
    template = "pygraph_trees: inputs of CUDA graphs are copied at each replay, as upstream does: {why}"


@functools.cache
def usable_driver() -> Driver | None:
    """The driver; None, after one warning, if it lacks a call that indirection needs."""
    if (why := why_unusable()) is not None:
        warnings.warn(IndirectionOff(why=why), stacklevel=2)
        return None
    return driver()


def why_unusable() -> str | None:
    """Names what is missing, or returns None."""
    if (found := driver()) is None:
        return "cuda.bindings is not installed: pip install cuda-bindings"
    missing = found.missing_calls()
    return f"the driver or its bindings are too old, they lack {', '.join(missing)}" if missing else None
