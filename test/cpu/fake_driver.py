"""A fake CUDA driver with the interface of ``cuda.bindings.driver``, which checks its callers.

:class:`FakeApi` holds graphs of nodes that a test builds, graphs instantiated from them, and virtual memory. Calls
return tuples that begin with a ``CUresult``, as the real ones do; on failure, all other elements are None. Handles are
objects that only support ``int()``; integers are accepted instead. A handle that was never given out, an argument of
the wrong type, a range that does not fit or a call on a stream in the wrong state is an ``AssertionError``: the driver
would crash, refuse or lie. :meth:`FakeApi.fail` makes the n-th next call of a name return an error or raise;
:meth:`FakeApi.lack` takes a call away.

As in the driver, an executable graph refuses an address for a copy or a fill if its kind of memory, in a reservation
or not, is not the kind that the node had when the graph was instantiated.

Nodes with parameters: ``make_graph(make_kernel([0x7000, b"abcd"]), make_memcpy(0x7000, 0x8000, 64), "HOST")``. Kernel
parameters are in real memory, since the driver's callers read them through pointers; device addresses are only numbers.
"""

from __future__ import annotations

import ctypes
import enum
import re
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace

from fake_calls import CUresult, FakeEdges, Handle, View
from fake_memory import GRANULE, CUdeviceptr, FakeMemory

__all__ = ["GRANULE", "KNOWN", "CUresult", "FakeApi", "little"]

KNOWN = "triton_poi_fused_add_0"  # a kernel that hides no address


def _enum(name: str, prefix: str, names: str, start: int = 0) -> type[enum.IntEnum]:
    return enum.IntEnum(name, [prefix + one for one in names.split()], start=start)


CUgraphNodeType = _enum(
    "CUgraphNodeType",
    "CU_GRAPH_NODE_TYPE_",
    "KERNEL MEMCPY MEMSET HOST GRAPH EMPTY WAIT_EVENT EVENT_RECORD EXT_SEMAS_SIGNAL EXT_SEMAS_WAIT MEM_ALLOC MEM_FREE"
    " BATCH_MEM_OP CONDITIONAL",
)
CUstreamCaptureStatus = _enum("CUstreamCaptureStatus", "CU_STREAM_CAPTURE_STATUS_", "NONE ACTIVE INVALIDATED")
CUstreamCaptureMode = _enum("CUstreamCaptureMode", "CU_STREAM_CAPTURE_MODE_", "GLOBAL THREAD_LOCAL RELAXED")
CUmemorytype = _enum("CUmemorytype", "CU_MEMORYTYPE_", "HOST DEVICE ARRAY UNIFIED", start=1)
_ATTRIBUTES = {"MEMORY_TYPE": 2, "RANGE_START_ADDR": 11, "RANGE_SIZE": 12}
_ATTRIBUTES = {f"CU_POINTER_ATTRIBUTE_{name}": number for name, number in _ATTRIBUTES.items()}
CUpointer_attribute = enum.IntEnum("CUpointer_attribute", _ATTRIBUTES)
CUlaunchAttributeID = _enum("CUlaunchAttributeID", "CU_LAUNCH_ATTRIBUTE_", "COOPERATIVE", start=2)


class CUcontext(Handle): ...


class CUgraphExec(Handle): ...


class CUgraphNode(Handle): ...


_structs: weakref.WeakValueDictionary[int, CUDA_KERNEL_NODE_PARAMS] = weakref.WeakValueDictionary()  # by "address"


class CUDA_KERNEL_NODE_PARAMS:
    func = property(lambda self: View(self, "func"), lambda self, value: self.__dict__.__setitem__("func", int(value)))
    kern = property(lambda self: View(self, "kern"), lambda self, value: self.__dict__.__setitem__("kern", int(value)))

    def __init__(self, function: int, kernel: int, parameters: int, extra: int) -> None:
        self.func, self.kern, self.kernelParams, self.extra = function, kernel, parameters, extra
        self.gridDimX, self.gridDimY, self.gridDimZ, self.sharedMemBytes = 4, 1, 1, 1024
        _structs[id(self)] = self

    def getPtr(self) -> int:
        return id(self)

    @staticmethod
    def at(address: int) -> CUDA_KERNEL_NODE_PARAMS:
        return _structs[address]


class _Fields:
    """A struct of numbers; device addresses become handles when they are read."""

    _fields: tuple[str, ...]

    def __init__(self, **values: int) -> None:
        for name in self._fields:
            setattr(self, name, values.pop(name, 0))
        assert not values, values

    def __setattr__(self, name: str, value: int) -> None:
        assert name in self._fields, name
        self.__dict__[name] = CUdeviceptr(value) if name in ("srcDevice", "dstDevice", "dst") else value

    def values(self) -> dict[str, int]:
        return {name: int(getattr(self, name)) for name in self._fields}


class CUDA_MEMCPY3D(_Fields):
    _fields = tuple(
        side + name
        for side in ("src", "dst")
        for name in ("XInBytes", "Y", "Z", "LOD", "MemoryType", "Host", "Device", "Array", "Pitch", "Height")
    ) + ("WidthInBytes", "Height", "Depth")


class CUDA_MEMSET_NODE_PARAMS(_Fields):
    _fields = ("dst", "pitch", "value", "elementSize", "width", "height")


class Kernel:
    """A kernel's parameters in memory of the driver, as ``kernelParams`` or packed as ``extra``."""

    def __init__(self, parameters: Sequence[bytes], packed: bool, name: str | None, known=True, apart=False) -> None:
        self.packed, self.name, self.known = packed, name, known
        self.layout: list[tuple[int, int]] = []
        block = bytearray()
        for parameter in parameters:
            block.extend(bytes(-len(block) % (len(parameter) & -len(parameter) & 7 or 8)))
            self.layout.append((len(block), len(parameter)))
            block.extend(parameter)
        self.block, self.nbytes = bytes(block), ctypes.c_size_t(len(block))
        if packed:
            self._parts = [ctypes.create_string_buffer(self.block, len(block))]
            entries = [2, ctypes.addressof(self.nbytes), 1, ctypes.addressof(self._parts[0]), 0]
        elif apart:
            self._parts = [ctypes.create_string_buffer(part, len(part)) for part in parameters]
            entries = [ctypes.addressof(part) for part in self._parts]
        else:  # with something else in the gaps
            content = bytearray(b"\xa5" * len(block))
            for (offset, nbytes), parameter in zip(self.layout, parameters, strict=True):
                content[offset : offset + nbytes] = parameter
            self._parts = [ctypes.create_string_buffer(bytes(content), len(content) + 1)]
            entries = [ctypes.addressof(self._parts[0]) + offset for offset, _ in self.layout]
        self._entries = (ctypes.c_uint64 * len(entries))(*entries)

    def pointers(self) -> tuple[int, int]:
        """``kernelParams`` and ``extra``."""
        entries = ctypes.addressof(self._entries) if len(self._entries) else 0
        return (0, entries) if self.packed else (entries, 0)

    def read(self, parameters: int, extra: int) -> bytes:
        """The bytes that the driver would copy out of such a struct."""
        if extra:
            assert not parameters, "both kernelParams and extra"
            entries = (ctypes.c_uint64 * 5).from_address(extra)
            pairs = {entries[0]: entries[1], entries[2]: entries[3]}
            assert pairs.keys() == {1, 2} and entries[4] == 0, f"extra is {list(entries)}"
            nbytes = ctypes.c_size_t.from_address(pairs[2]).value
            assert nbytes == self.nbytes.value, f"{nbytes} bytes of parameters, not {self.nbytes.value}"
            return ctypes.string_at(pairs[1], nbytes)
        assert bool(parameters) == bool(self.layout), f"kernelParams is {parameters:#x}"
        block = bytearray(self.nbytes.value)
        for i, (offset, nbytes) in enumerate(self.layout):
            part = ctypes.c_uint64.from_address(parameters + 8 * i).value
            block[offset : offset + nbytes] = ctypes.string_at(part, nbytes)
        return bytes(block)


@dataclass
class Node:
    kind: CUgraphNodeType
    content: Kernel | CUDA_MEMCPY3D | CUDA_MEMSET_NODE_PARAMS | None = None
    handle: int = 0  # of a kernel's function
    has_function: bool = True
    child: int | None = None

    def functions(self) -> tuple[int, int]:
        """``func`` and ``kern``."""
        return (self.handle, 0) if self.has_function else (0, self.handle)


def little(*words: int) -> bytes:
    """Words of 8 bytes, as they are in memory."""
    return b"".join(word.to_bytes(8, "little") for word in words)


def _addresses(values: dict[str, int]) -> list[int]:
    """Those of a copy's two sides, or of a fill."""
    if "dst" in values:
        return [values["dst"]]
    return [values[side + ("Host" if values[f"{side}MemoryType"] == 1 else "Device")] for side in ("src", "dst")]


class FakeApi(FakeEdges, FakeMemory):
    CUgraphNodeType = CUgraphNodeType
    CUstreamCaptureStatus = CUstreamCaptureStatus
    CUstreamCaptureMode = CUstreamCaptureMode
    CUmemorytype = CUmemorytype
    CUpointer_attribute = CUpointer_attribute
    CUlaunchAttributeID = CUlaunchAttributeID
    CUgraphExec = CUgraphExec
    CUgraphNode = CUgraphNode

    def __init__(self) -> None:
        super().__init__()
        self.driver_version = 13000
        self.capture_mode = CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL
        self.context = CUcontext(next(self._handles))
        self.context_of_another_device = CUcontext(next(self._handles))
        self._of_thread = threading.local()  # each thread's context; the thread that made this has one
        self._of_thread.context = self.context
        self._nodes: dict[int, Node] = {}
        self._functions: dict[tuple[int, bool], Kernel] = {}  # by handle, whether it is a CUfunction
        self._execs: dict[int, dict[int, bytes | dict[str, int]]] = {}
        self._reserved_sides: dict[tuple[int, int], list[bool]] = {}  # of copies and fills, by graph and node
        self._modules: dict[int, str] = {}  # PTX by handle
        self._host: dict[int, tuple[ctypes.Array, bool]] = {}  # by address: memory, whether it is pinned
        self.allocations: list[tuple[int, int]] = []  # address and bytes, known only as the range around an address
        self.cooperative: set[int] = set()  # kernel nodes
        self.lack("cuStreamGetCaptureInfo_v3", "bindings")
        self.held: list[object] = []  # objects that must live as long

    # What a test builds

    def make_stream(self) -> int:
        stream = next(self._handles)
        self._streams[stream] = (CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_NONE, 0)
        return stream

    def make_graph(self, *nodes: str | int, children: dict[int, int] | None = None) -> int:
        """A graph of nodes, given as handles or as kinds ("KERNEL"); ``children``: child graphs by position."""
        graph = next(self._handles)
        self._graphs[graph] = []
        for position, node in enumerate(nodes):
            if isinstance(node, str):
                node = self._make_kind(node, (children or {}).get(position))
            assert node in self._nodes and not any(node in others for others in self._graphs.values()), node
            self._graphs[graph].append(node)
        return graph

    def _make_kind(self, kind: str, child: int | None) -> int:
        if kind == "KERNEL":
            return self.make_kernel([])
        if kind == "MEMCPY":
            return self.make_memcpy(0x10, 0x20, 16)
        if kind == "MEMSET":
            return self.make_memset(0x10, 16)
        return self._add(Node(CUgraphNodeType[f"CU_GRAPH_NODE_TYPE_{kind}"], child=child))

    def _add(self, node: Node) -> int:
        handle = next(self._handles)
        self._nodes[handle] = node
        return handle

    def make_kernel(self, words: Sequence[int | bytes], packed=False, name=KNOWN, func=True, **options: bool) -> int:
        """A kernel node; each word is a parameter of 8 bytes, each ``bytes`` is one of its own size.

        Parameters are at multiples of the power of two that divides their size, up to 8. ``func=False`` gives the
        node a ``CUkernel``; ``name=None`` and ``known=False`` make the driver refuse to give its name and its layout.
        The node keeps the parameters in one piece, or ``apart``.
        """
        assert not isinstance(words, (bytes, bytearray)), "a list of parameters"
        parameters = [word if isinstance(word, bytes) else word.to_bytes(8, "little") for word in words]
        assert all(parameters), "a parameter without bytes"
        kernel, handle = Kernel(parameters, packed, name, **options), next(self._handles)
        self._functions[handle, func] = kernel
        return self._add(Node(CUgraphNodeType.CU_GRAPH_NODE_TYPE_KERNEL, kernel, handle, func))

    def make_memcpy(
        self, source: int, target: int, nbytes: int, source_type="DEVICE", target_type="DEVICE", **more: int
    ) -> int:
        """A memcpy node; types are "HOST", "DEVICE", "ARRAY", "UNIFIED"; ``more`` fields: Height, srcXInBytes ..."""
        fields = {"WidthInBytes": nbytes, "Height": 1, "Depth": 1, **more}
        for side, kind, address in (("src", source_type, source), ("dst", target_type, target)):
            fields[f"{side}MemoryType"] = CUmemorytype[f"CU_MEMORYTYPE_{kind}"]
            fields[side + {"HOST": "Host", "ARRAY": "Array"}.get(kind, "Device")] = address
        return self._add(Node(CUgraphNodeType.CU_GRAPH_NODE_TYPE_MEMCPY, CUDA_MEMCPY3D(**fields)))

    def make_memset(self, target: int, nbytes: int, element: int = 1, rows: int = 1, pitch: int = 0) -> int:
        """A memset node of rows of ``nbytes`` bytes each."""
        assert nbytes % element == 0
        fields = {"dst": target, "pitch": pitch, "elementSize": element, "width": nbytes // element, "height": rows}
        return self._add(Node(CUgraphNodeType.CU_GRAPH_NODE_TYPE_MEMSET, CUDA_MEMSET_NODE_PARAMS(**fields)))

    def make_host(self, data: bytes, pinned: bool = True) -> int:
        """The address of real host memory that holds ``data``; the driver knows it only if it is pinned."""
        buffer = ctypes.create_string_buffer(data, len(data))
        self._host[ctypes.addressof(buffer)] = (buffer, pinned)
        return ctypes.addressof(buffer)

    def instantiate(self, graph: int) -> int:
        """An executable graph with its own copy of all parameters."""
        exec_ = next(self._handles)
        self._execs[exec_] = {}
        for handle in self._graphs[graph]:
            node = self._nodes[handle]
            if isinstance(node.content, Kernel):
                self._execs[exec_][handle] = node.content.block
            elif node.content is not None:
                self._execs[exec_][handle] = values = node.content.values()
                self._reserved_sides[exec_, handle] = self._in_reservations(values)
        return exec_

    def _in_reservations(self, values: dict[str, int]) -> list[bool]:
        """Whether each address of a copy or a fill is in a reservation."""
        return [self.is_reserved(address) for address in _addresses(values)]

    def exec_parameters(self, exec_: int, node: int) -> bytes:
        """By offset of relocations: a kernel's block; a memcpy's source and target, a memset's target, 8 bytes each."""
        held = self._execs[exec_][node]
        if isinstance(held, bytes):
            return held
        return little(*_addresses(held))

    def capture(self, stream: int, graph: int, status: str = "ACTIVE") -> None:
        self._streams[stream] = (CUstreamCaptureStatus[f"CU_STREAM_CAPTURE_STATUS_{status}"], graph)

    def append(self, stream: int, node: int) -> None:
        """Captures a node."""
        graph = self._streams[stream][1]
        self._graphs[graph].append(node)
        self.connect(graph, ((before, node, 0) for before in self._captured_last.get(stream, ())))
        self._captured_last[stream] = [node]

    # Streams and graphs

    def wait(self, stream: int, other: int) -> None:
        """A stream waits for an event of another one, and so joins its capture."""
        if self._streams[other][1]:
            assert self._streams[stream][1] in (0, self._streams[other][1]), "it captures another graph"
            self._streams[stream] = self._streams[other]
            last = self._captured_last.setdefault(stream, [])
            last += [node for node in self._captured_last.get(other, ()) if node not in last]

    def cuThreadExchangeStreamCaptureMode(self, mode: CUstreamCaptureMode):
        assert isinstance(mode, CUstreamCaptureMode), mode
        answer = self._answer("cuThreadExchangeStreamCaptureMode", self.capture_mode)
        if answer[0] == 0:
            self.capture_mode = mode
        return answer

    def cuDriverGetVersion(self):
        return self._answer("cuDriverGetVersion", self.driver_version)

    def cuCtxGetCurrent(self):
        answer = self._answer("cuCtxGetCurrent", getattr(self._of_thread, "context", CUcontext(0)))
        self.calls.pop()  # asked before each of the others; it would clutter the list
        return answer

    def cuCtxSetCurrent(self, context):
        contexts = {int(self.context), int(self.context_of_another_device)}
        assert isinstance(context, CUcontext) and int(context) in contexts, f"no context {context!r}"
        (code,) = self._answer("cuCtxSetCurrent")
        if code == 0:
            self._of_thread.context = context
        return (code,)

    def cuStreamGetCaptureInfo(self, stream: int, call: str = "cuStreamGetCaptureInfo"):
        assert isinstance(stream, int) and stream in self._streams, f"no stream {stream!r}"
        status, graph = self._streams[stream]
        last = [CUgraphNode(node) for node in self._captured_last.get(stream, ())]
        # As in CUDA 13: status, id, graph, dependencies, edge data, number of dependencies.
        return self._answer(call, status, 7, graph, last, [None for _ in last], len(last))

    def cuStreamGetCaptureInfo_v3(self, stream: int):
        """The same call in the bindings of CUDA 12.3 and later; a test must say that these are used."""
        return self.cuStreamGetCaptureInfo(stream, "cuStreamGetCaptureInfo_v3")

    # Kernels that are loaded from PTX

    def cuModuleLoadData(self, image: bytes):
        assert isinstance(image, bytes) and image.endswith(b"}\n\0"), image
        answer = self._answer("cuModuleLoadData", next(self._handles))
        if answer[0] == 0:
            self._modules[answer[1]] = image.decode()
        return answer

    def cuModuleGetFunction(self, module: int, name: bytes):
        entry = re.search(rf"\.entry {name.decode()}\((.*)\)\n", self._modules[module])
        sizes = {".u64": 8, ".u32": 4}
        parameters = [
            bytes(sizes[kind] if kind in sizes else int(count))
            for kind, count in re.findall(r"\.param (?:\.align 16 )?(\.\w+) \w+(?:\[(\d+)\])?", entry[1])
        ]
        answer = self._answer("cuModuleGetFunction", next(self._handles))
        if answer[0] == 0:
            self._functions[answer[1], True] = Kernel(parameters, False, name.decode())
        return answer

    def cuLaunchKernel(self, function, *more):
        *grid, shared, stream, parameters, extra = more
        assert (grid[1:3], grid[4:], shared, extra) == ([1, 1], [1, 1], 0, 0) and min(grid) > 0, more
        loaded = self._kernel(function, True)
        block = loaded.read(parameters, extra)
        result = self._enter("cuLaunchKernel")
        if result == 0 and stream in self._streams and self._streams[stream][1]:
            kernel = Kernel([block[at : at + nbytes] for at, nbytes in loaded.layout], False, loaded.name)
            self.append(stream, self._add(Node(CUgraphNodeType.CU_GRAPH_NODE_TYPE_KERNEL, kernel, function)))
        return (result,)

    def cuGraphGetNodes(self, graph: int, count: int):
        assert graph in self._graphs, f"no graph {graph!r}"
        nodes = self._graphs[graph]
        assert count in (0, len(nodes)), f"asked for {count} of {len(nodes)} nodes"
        return self._answer("cuGraphGetNodes", [CUgraphNode(node) for node in nodes[:count]], len(nodes))

    def cuGraphNodeGetType(self, node: int):
        return self._answer("cuGraphNodeGetType", self._node(node).kind)

    def cuGraphChildGraphNodeGetGraph(self, node: int):
        child = self._node(node, "GRAPH").child
        assert child is not None, f"{node!r} has no child graph"
        return self._answer("cuGraphChildGraphNodeGetGraph", child)

    # Nodes

    def _node(self, node: int | Handle, kind: str | None = None) -> Node:
        assert isinstance(node, (int, CUgraphNode)) and int(node) in self._nodes, f"no node {node!r}"
        found = self._nodes[int(node)]
        assert kind in (None, found.kind.name.removeprefix("CU_GRAPH_NODE_TYPE_")), f"{node!r} is {found.kind.name}"
        return found

    def cuGraphKernelNodeGetParams(self, node: int):
        found = self._node(node, "KERNEL")
        params = CUDA_KERNEL_NODE_PARAMS(*found.functions(), *found.content.pointers())
        return self._answer("cuGraphKernelNodeGetParams", params)

    def cuGraphKernelNodeGetAttribute(self, node: int, attribute: CUlaunchAttributeID):
        assert attribute is CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_COOPERATIVE, attribute
        self._node(node, "KERNEL")
        return self._answer("cuGraphKernelNodeGetAttribute", SimpleNamespace(cooperative=int(node in self.cooperative)))

    def _copy_of_fields(self, call: str, node: int, kind: str):
        fields = self._node(node, kind).content
        return self._answer(call, type(fields)(**fields.values()))

    def cuGraphMemcpyNodeGetParams(self, node: int):
        return self._copy_of_fields("cuGraphMemcpyNodeGetParams", node, "MEMCPY")

    def cuGraphMemsetNodeGetParams(self, node: int):
        return self._copy_of_fields("cuGraphMemsetNodeGetParams", node, "MEMSET")

    def _kernel(self, handle: int, is_function: bool) -> Kernel:
        assert (handle, is_function) in self._functions, f"no {'CUfunction' if is_function else 'CUkernel'} {handle!r}"
        return self._functions[handle, is_function]

    def _parameter(self, call: str, kernel: Kernel, index: int):
        if not kernel.known or index >= len(kernel.layout):
            return self._enter(call) or CUresult.CUDA_ERROR_INVALID_VALUE, None, None
        return self._answer(call, *kernel.layout[index])

    def cuFuncGetParamInfo(self, function: int, index: int):
        return self._parameter("cuFuncGetParamInfo", self._kernel(function, True), index)

    def cuKernelGetParamInfo(self, kernel: int, index: int):
        return self._parameter("cuKernelGetParamInfo", self._kernel(kernel, False), index)

    def _name(self, call: str, kernel: Kernel):
        if kernel.name is None:
            return self._enter(call) or CUresult.CUDA_ERROR_INVALID_VALUE, None
        return self._answer(call, kernel.name.encode())

    def cuFuncGetName(self, function: int):
        return self._name("cuFuncGetName", self._kernel(function, True))

    def cuKernelGetName(self, kernel: int):
        return self._name("cuKernelGetName", self._kernel(kernel, False))

    def _held(self, exec_: int | Handle, node: int | Handle) -> dict:
        assert isinstance(exec_, (int, CUgraphExec)) and int(exec_) in self._execs, f"no executable graph {exec_!r}"
        assert int(node) in self._execs[int(exec_)], f"{node!r} is no node of {exec_!r}"
        return self._execs[int(exec_)]

    def _set(self, call: str, held: dict, node: int | Handle, new: bytes | dict[str, int], refused: bool = False):
        assert hasattr(self._of_thread, "context"), f"{call} in a thread without a context, which crashes"
        assert int(self._of_thread.context) == int(self.context), f"{call} while another device is current"
        result = self._enter(call) or (CUresult.CUDA_ERROR_INVALID_VALUE if refused else CUresult.CUDA_SUCCESS)
        if result == 0:
            held[int(node)] = new
        return (result,)

    def cuGraphExecKernelNodeSetParams(self, exec_, node, params):
        found, held = self._node(node, "KERNEL"), self._held(exec_, node)
        assert type(params) is CUDA_KERNEL_NODE_PARAMS, type(params)
        assert (int(params.func), int(params.kern)) == found.functions(), "another kernel"
        kernel, block = found.content, found.content.read(params.kernelParams, params.extra)
        assert kernel.read(*kernel.pointers()) == kernel.block, "the node's own memory was written to"
        return self._set("cuGraphExecKernelNodeSetParams", held, node, block)

    def _check_fields(self, node, params, kind: str, old: dict[str, int], changeable: set[str]) -> dict[str, int]:
        assert type(params) is type(self._node(node, kind).content), type(params)
        new = params.values()
        assert all(new[name] == old[name] for name in new if name not in changeable), f"{new}, not {old}"
        return new

    def _set_fields(self, exec_, node, params, context, kind: str, changeable: set[str]):
        held = self._held(exec_, node)
        assert isinstance(context, CUcontext) and int(context) == int(self.context), f"no context {context!r}"
        new = self._check_fields(node, params, kind, held[int(node)], changeable)
        other_kind = self._in_reservations(new) != self._reserved_sides[int(exec_), int(node)]
        return self._set(f"cuGraphExec{kind.capitalize()}NodeSetParams", held, node, new, refused=other_kind)

    def cuGraphExecMemcpyNodeSetParams(self, exec_, node, params, context):
        assert params.Height <= 1 and params.Depth <= 1 and params.WidthInBytes > 0, "not of one row"
        return self._set_fields(exec_, node, params, context, "MEMCPY", {"srcDevice", "dstDevice", "srcHost"})

    def cuGraphExecMemsetNodeSetParams(self, exec_, node, params, context):
        return self._set_fields(exec_, node, params, context, "MEMSET", {"dst"})

    def _set_captured_fields(self, node, params, kind: str, changeable: set[str]):
        found = self._node(node)
        new = self._check_fields(node, params, kind, found.content.values(), changeable)
        if (result := self._enter(f"cuGraph{kind.capitalize()}NodeSetParams")) == 0:
            found.content = type(params)(**new)
        return (result,)

    def cuGraphMemcpyNodeSetParams(self, node, params):
        return self._set_captured_fields(node, params, "MEMCPY", {"srcDevice", "dstDevice"})

    def cuGraphMemsetNodeSetParams(self, node, params):
        return self._set_captured_fields(node, params, "MEMSET", {"dst"})

    def cuPointerGetAttribute(self, attribute: CUpointer_attribute, address: int):
        assert isinstance(attribute, CUpointer_attribute) and isinstance(address, int)
        call = "cuPointerGetAttribute"
        if attribute is not CUpointer_attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
            found = [place for place in self.allocations if place[0] <= address < sum(place)]
            if not found:
                return self._enter(call) or CUresult.CUDA_ERROR_INVALID_VALUE, None
            is_start = attribute is CUpointer_attribute.CU_POINTER_ATTRIBUTE_RANGE_START_ADDR
            return self._answer(call, CUdeviceptr(found[0][0]) if is_start else found[0][1])
        host = [pinned for start, (buffer, pinned) in self._host.items() if start <= address < start + len(buffer)]
        if host == [False] or (self.is_reserved(address) and not self.is_mapped(address)):
            return self._enter(call) or CUresult.CUDA_ERROR_INVALID_VALUE, None
        return self._answer(call, CUmemorytype.CU_MEMORYTYPE_HOST if host else CUmemorytype.CU_MEMORYTYPE_DEVICE)
