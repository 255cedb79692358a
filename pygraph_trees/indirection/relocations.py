"""Relocations: where a captured graph holds the addresses of the inputs with which it was recorded.

:func:`scan` takes a captured graph that is not yet instantiated, while its placeholders are mapped. The :class:`Scan`
lists the relocations, the inputs that cannot be patched, and whether a node may hold an address that cannot be read; it
also names unknown kernels. It changes nothing. Only a graph whose nodes cannot be listed raises :class:`DriverError`.
README.md gives the rules.
"""

from __future__ import annotations

import ctypes
import os
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

import torch

from pygraph_trees.cuda.graph_nodes import GraphNode, Layouts, NodeKind
from pygraph_trees.errors import DriverError
from pygraph_trees.reasons import Reason, Why

from .known_kernels import is_known
from .placeholder import Placeholders, stands_out

if TYPE_CHECKING:
    from pygraph_trees.cuda.driver import Driver


_WITHOUT_INPUTS = (
    *(NodeKind.EMPTY, NodeKind.WAIT_EVENT, NodeKind.EVENT_RECORD),
    *(NodeKind.MEM_ALLOC, NodeKind.MEM_FREE),
)

_HOST_CHUNK = 16 << 20  # bytes of host memory read at once; a multiple of 8

# Names as the driver gives them, mangled for C++ kernels: ncclKernel_, ncclDevKernel_, ncclSymkDevKernel_ ...
_COLLECTIVE = re.compile(r"(_ZN?\d+)?nccl\w*Kernel")


SOURCE, TARGET, HOST_SOURCE = 0, 8, 16  # values of Relocation.offset in a memcpy node
BY_VALUE = -1  # in a kernel node that holds staged bytes by value: the address from which it copies them


class Relocation(NamedTuple):
    """A place where a graph holds an input's address."""

    node: int  # index into Scan.nodes
    offset: int  # bytes into a kernel's parameter block, or one of the values above; for a memset 0
    input: int  # index of the placeholder; after the placeholders, of the memory of staged inputs
    addend: int  # bytes from the start; in the guards it is negative, or not less than the size


@dataclass(frozen=True, slots=True)
class Scan:
    """The recorded addresses that a graph holds."""

    nodes: tuple[GraphNode, ...]  # nodes with a relocation, once each, in the graph's order
    relocations: tuple[
        Relocation, ...
    ]  # in the order of their nodes and offsets; relocations of refused inputs may be among them
    refused: dict[int, Why]  # by placeholder: why it cannot be patched, despite its relocations
    opaque: str | None  # what may hide any address, for example "a host node"; None if everything was read
    kinds: Counter[NodeKind]  # of all nodes, without those of child graphs
    unknown: tuple[str, ...] = ()  # names of kernels that may be given an address in a form that is no word


def scan(
    driver: Driver,
    graph: int,
    placeholders: Placeholders,
    staged: Sequence[tuple[int, int]] = (),
    by_value: Mapping[int, int] = MappingProxyType({}),
    hide_nothing: Collection[int] = (),
) -> Scan:
    """Finds the relocations of a captured graph. Raises :class:`DriverError` if the graph's nodes cannot be listed.

    Args:
        staged: address and size in bytes of each memory of staged inputs; one copy may take several inputs from it.
        by_value: the kernel nodes that hold staged bytes by value, and the address from which each copies them.
        hide_nothing: nodes of collectives whose tensors are known.
    """
    reader = _Reader(driver, placeholders, staged, by_value, hide_nothing)
    for position, handle in enumerate(driver.nodes(graph)):
        reader.read(position, driver.node_kind(handle), handle)
    return reader.result()


class _Reader:
    """The findings so far in one graph; a position is that of a node in the graph."""

    def __init__(
        self,
        driver: Driver,
        placeholders: Placeholders,
        staged: Sequence[tuple[int, int]],
        by_value: Mapping[int, int],
        hide_nothing: Collection[int],
    ) -> None:
        self._driver = driver
        self._placeholders = placeholders
        self._staged, self._by_value, self._hide_nothing = staged, by_value, hide_nothing
        self._nodes: dict[int, GraphNode] = {}  # by position
        self._relocations: list[tuple[int, int, int, int]] = []  # position, offset, input, addend
        self._refused: dict[int, Why] = {}
        self._opaque: str | None = None
        self._kinds: Counter[NodeKind] = Counter()
        # By the handles of a kernel. The driver reuses them after their module is unloaded: valid for one scan.
        self._collectives: dict[tuple[int, int], bool] = {}
        self._unknown: dict[str, None] = {}  # names of kernels, in order
        self._layouts: Layouts = {}
        self._readers: dict[NodeKind, tuple[Callable[[int, int], None], str]] = {
            NodeKind.KERNEL: (self._kernel, "a kernel whose parameters cannot be read"),
            NodeKind.MEMCPY: (self._memcpy, "a copy that cannot be read"),
            NodeKind.MEMSET: (self._memset, "a fill that cannot be read"),
            # These nodes take events, and memory that belongs to the graph.
            **dict.fromkeys(_WITHOUT_INPUTS, (lambda position, handle: None, "")),
            NodeKind.HOST: (lambda position, handle: self._hide("a host node", handle), ""),
            NodeKind.GRAPH: (lambda position, handle: self._hide("a child graph", handle), ""),
            NodeKind.OTHER: (lambda position, handle: self._hide("a node that cannot be read", handle), ""),
        }

    def read(self, position: int, kind: NodeKind, handle: int) -> None:
        self._kinds[kind] += 1
        reader, unread = self._readers[kind]
        try:
            reader(position, handle)
        except DriverError:
            self._hide(unread)

    def _kernel(self, position: int, handle: int) -> None:
        node = self._driver.kernel_node(handle, self._layouts)
        if handle in self._by_value:
            self._staged_at(position, node, BY_VALUE, self._by_value[handle])
            return
        is_collective = self._look_at_name(node.function, node.kernel)
        if is_collective:
            self._hide("a collective", handle)
        for offset, address in _words(node.words(), self._placeholders):
            found = self._input_at(address) if node.may_be_address(offset) else None
            if found is None:
                continue
            if is_collective:
                self._refuse(found, Reason.READ_BY_COLLECTIVE())
            elif offset % 8 or offset + 8 > node.nbytes or not (stands_out(address) or node.is_word(offset)):
                self._refuse(found, Reason.AMBIGUOUS())
            else:
                self._relocation(position, node, offset, found, address)

    def _memcpy(self, position: int, handle: int) -> None:
        node = self._driver.memcpy_node(handle)
        if not node.plain:
            self._hide("a copy of rows or arrays")
            return
        for offset, address in ((SOURCE, node.source), (TARGET, node.target)):
            if address is not None and (found := self._input_at(address)) is not None:
                self._relocation(position, node, offset, found, address)
        if node.host_source is not None:
            self._staged_at(position, node, HOST_SOURCE, node.host_source)
            try:
                for address in _host_words(node.host_source, node.nbytes, node.target or 0, self._placeholders):
                    self._refuse(self._near(address), Reason.IN_HOST_ARRAY())
            except OSError:
                self._hide("a copy from host memory that cannot be read")

    def _staged_at(self, position: int, node: GraphNode, offset: int, address: int) -> None:
        """Notes a node that copies staged inputs from an address, if they are there."""
        for number, (start, nbytes) in enumerate(self._staged):
            if start <= address < start + nbytes:
                self._nodes[position] = node
                first = len(self._placeholders.placeholders)
                self._relocations.append((position, offset, first + number, address - start))

    def _memset(self, position: int, handle: int) -> None:
        node = self._driver.memset_node(handle)
        found = self._input_at(node.target)
        if not node.plain:
            self._refuse(found, Reason.FILLED_IN_ROWS())
        elif found is not None:
            self._relocation(position, node, 0, found, node.target)

    def result(self) -> Scan:
        order = sorted(self._nodes)
        index = {position: i for i, position in enumerate(order)}
        relocations = tuple(
            Relocation(index[p], offset, found, addend) for p, offset, found, addend in sorted(self._relocations)
        )
        nodes = tuple(self._nodes[p] for p in order)
        return Scan(nodes, relocations, self._refused, self._opaque, self._kinds, tuple(self._unknown))

    def _input_at(self, address: int) -> int | None:
        found = self._near(address)
        if found is not None and self._placeholders.placeholders[found].is_far_from(address):
            self._hide("a pointer far outside of every input")
            return None
        return found

    def _near(self, address: int) -> int | None:
        """The input in whose range or guards an address is, at any distance from the input."""
        found = self._placeholders.find(address)
        if found is None and self._placeholders.low <= address < self._placeholders.high:
            self._hide("a pointer far outside of every input")
        return found

    def _relocation(self, position: int, node: GraphNode, offset: int, found: int, address: int) -> None:
        self._nodes[position] = node
        self._relocations.append((position, offset, found, address - self._placeholders.placeholders[found].start))

    def _refuse(self, found: int | None, why: Why) -> None:
        if found is not None:
            self._refused.setdefault(found, why)

    def _hide(self, what: str, handle: int | None = None) -> None:
        """Notes what may hide addresses; if it is a node of known tensors, it hides none."""
        if handle is None or handle not in self._hide_nothing:
            self._opaque = self._opaque or what

    def _look_at_name(self, function: int, kernel: int) -> bool:
        """Whether a kernel is a collective. One without a name may be anything, and hide addresses.

        Notes unknown kernels. The driver is asked once for each kernel, not once for each node.
        """
        key = function, kernel
        if key not in self._collectives:
            name = self._driver.function_name(function, kernel)
            self._collectives[key] = name is not None and _COLLECTIVE.match(name) is not None
            if name is None:
                self._hide("a kernel whose name cannot be told")
            elif not self._collectives[key] and not is_known(name):
                self._unknown[name] = None
        return self._collectives[key]


def _words(data: bytes, placeholders: Placeholders) -> list[tuple[int, int]]:
    """Offset and value of each word among the placeholders, at all multiples of 4 bytes, by offset."""
    low, high = placeholders.low, placeholders.high
    found: list[tuple[int, int]] = []
    for begin in (0, 4):
        words = memoryview(data)[begin : begin + (len(data) - begin) // 8 * 8].cast("Q")
        found += [(begin + 8 * i, word) for i, word in enumerate(words) if low <= word < high]
    return sorted(found)


def _read_host(memory: int, target: memoryview, address: int) -> None:
    """Reads this process's memory; raises :class:`OSError` if it is not mapped.

    Pinned memory can be mapped such that the file cannot be read there (VM_IO); if it is mapped, it is loaded.
    """
    try:
        if os.preadv(memory, [target], address) == len(target):
            return
    except OSError:
        pass
    if not _is_readable(address, address + len(target)):
        raise OSError(f"{len(target)} bytes at {address:#x} are not all mapped")
    target[:] = ctypes.string_at(address, len(target))


def _is_readable(begin: int, end: int) -> bool:
    """Whether a whole range is mapped for reading."""
    with open("/proc/self/maps", encoding="ascii", errors="replace") as lines:
        for line in lines:
            span, rights = line.split()[:2]
            first, last = (int(part, 16) for part in span.split("-"))
            if first <= begin < last:
                if not rights.startswith("r"):
                    return False
                begin = last
                if begin >= end:
                    return True
    return False


def _host_words(start: int, nbytes: int, target: int, placeholders: Placeholders) -> Iterator[int]:
    """The words among the placeholders in this process's memory, aligned as they will be at ``target``.

    Memory that is not mapped raises :class:`OSError`; a plain load would end the process.
    """
    lead = target % 8
    with open("/proc/self/mem", "rb", buffering=0) as memory:
        for begin in range(0, nbytes, _HOST_CHUNK):
            wanted = min(_HOST_CHUNK + 8, nbytes - begin)  # a word may run over the end of a chunk
            data = bytearray(lead + wanted)
            _read_host(memory.fileno(), memoryview(data)[lead:], start + begin)
            for offset in (0, 4):
                if (count := (len(data) - offset) // 8) > 0:
                    words = torch.frombuffer(data, dtype=torch.int64, offset=offset, count=count)
                    yield from words[(words >= placeholders.low) & (words < placeholders.high)].tolist()
