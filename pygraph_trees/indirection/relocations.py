"""Relocations: where a captured graph holds the addresses of the inputs with which it was recorded.

:func:`scan` takes a captured graph that is not yet instantiated, while its placeholders are mapped. The :class:`Scan`
lists the relocations, the inputs that cannot be patched, and whether a node may hold an address that cannot be read; it
also names unknown kernels. It changes nothing. Only a graph whose nodes cannot be listed raises :class:`DriverError`.
README.md gives the rules.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

import torch

from pygraph_trees.cuda.copy_nodes import HOST_SOURCE, SOURCE, TARGET, MemcpyNode, MemsetNode
from pygraph_trees.cuda.graph_nodes import GraphNode, KernelNode, Layouts, NodeKind
from pygraph_trees.cuda.value_kernel import NAME
from pygraph_trees.errors import DriverError
from pygraph_trees.reasons import Reason, Why

from .known_kernels import is_known
from .placeholder import Placeholders, stands_out
from .structs import Pointers, numbers_in, pointers_of

if TYPE_CHECKING:
    from pygraph_trees.cuda.driver import Driver


# All other nodes take events, and memory that belongs to the graph.
_HIDING = {
    NodeKind.HOST: "a host node",
    NodeKind.GRAPH: "a child graph",
    NodeKind.OTHER: "a node that cannot be read",
}
_UNREAD = {
    NodeKind.KERNEL: "a kernel whose parameters cannot be read",
    NodeKind.MEMCPY: "a copy that cannot be read",
    NodeKind.MEMSET: "a fill that cannot be read",
}

_HOST_CHUNK = 16 << 20  # bytes of host memory read at once; a multiple of 8

# Names as the driver gives them, mangled for C++ kernels: ncclKernel_, ncclDevKernel_, ncclSymkDevKernel_ ...
_COLLECTIVE = re.compile(r"(_ZN?\d+)?nccl\w*Kernel")


BY_VALUE = -1  # in a kernel node that holds staged bytes by value: the address from which it copies them


class Relocation(NamedTuple):
    """A place where a graph holds an input's address."""

    node: int  # index into Scan.nodes
    offset: int  # bytes into a kernel's parameter block, or ``BY_VALUE``; the word of a copy or fill
    input: int  # index of the placeholder; after the placeholders, of the memory of staged inputs
    addend: int  # bytes from the start; in the guards it is negative, or not less than the size


@dataclass(frozen=True, slots=True)
class Scan:
    """The recorded addresses that a graph holds."""

    nodes: tuple[GraphNode, ...]  # nodes with a relocation, once each, in the graph's order
    relocations: tuple[Relocation, ...]  # by node and offset; those of refused inputs may be among them
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
    recorded: Sequence[int] = (),
) -> Scan:
    """Finds the relocations of a captured graph.

    Args:
        staged: address and size in bytes of each memory of staged inputs; one copy may take several inputs from it.
        by_value: the kernel nodes that hold staged bytes by value, and the address from which each copies them.
        hide_nothing: nodes of collectives whose tensors are known.
        recorded: by placeholder, the address of the input's first element; by default, the placeholder's start.
    """
    recorded = recorded or [placeholder.start for placeholder in placeholders.placeholders]
    found = _Reader(driver, placeholders, staged, by_value, hide_nothing, recorded)
    for handle in driver.nodes(graph):
        found.read(driver.node_kind(handle), handle)
    return Scan(
        *(tuple(found.nodes), tuple(found.relocations), found.refused, found.opaque, found.kinds, tuple(found.unknown))
    )


@dataclass(slots=True)
class _Reader:
    """The findings so far in one graph."""

    driver: Driver
    placeholders: Placeholders
    staged: Sequence[tuple[int, int]]
    by_value: Mapping[int, int]
    hide_nothing: Collection[int]
    recorded: Sequence[int]
    nodes: list[GraphNode] = field(default_factory=list)
    relocations: list[Relocation] = field(default_factory=list)
    refused: dict[int, Why] = field(default_factory=dict)
    opaque: str | None = None
    kinds: Counter[NodeKind] = field(default_factory=Counter)
    unknown: dict[str, None] = field(default_factory=dict)  # names of kernels, in order
    # The driver reuses handles of kernels after their module is unloaded: valid for one scan.
    layouts: Layouts = field(default_factory=dict)

    def read(self, kind: NodeKind, handle: int) -> None:
        self.kinds[kind] += 1
        try:
            if kind in _HIDING:
                self._hide(_HIDING[kind], handle)
            elif kind is NodeKind.KERNEL:
                self._kernel(handle)
            elif kind is NodeKind.MEMCPY:
                self._memcpy(handle)
            elif kind is NodeKind.MEMSET:
                self._memset(handle)
        except DriverError:
            self._hide(_UNREAD[kind])

    def _kernel(self, handle: int) -> None:
        node = KernelNode(self.driver, handle, self.layouts)
        if handle in self.by_value:
            self._staged_at(node, BY_VALUE, self.by_value[handle])
            return
        name = self.driver.function_name(node.function, node.kernel)
        is_collective = name is not None and _COLLECTIVE.match(name) is not None
        if name is None:
            self._hide("a kernel whose name cannot be told")
        elif is_collective:
            self._hide("a collective", handle)
        elif not is_known(name):
            self.unknown[name] = None
        writes_table = name is not None and name.startswith(NAME)  # its bytes are addresses
        numbers = range(0) if name is None else numbers_in(name, node.layout)
        pointers = Pointers.ANY if name is None else pointers_of(name)
        for offset, address in _words(node.words(), self.placeholders):
            if not node.may_be_address(offset) or (numbers is not None and offset in numbers):
                continue
            is_alone = node.is_word(offset)
            if (found := self._near(address, is_alone=is_alone)) is None:
                continue
            if not is_alone and (numbers is None or not self._may_hold(pointers, found, address)):
                self._refuse(found, Reason.AMBIGUOUS())
                continue
            if self._is_far(found, address):
                continue
            is_sure = writes_table or stands_out(address) or is_alone
            if is_collective:
                self._refuse(found, Reason.READ_BY_COLLECTIVE())
            elif offset % 8 or offset + 8 > node.nbytes or not is_sure:
                self._refuse(found, Reason.AMBIGUOUS())
            else:
                self._relocation(node, offset, found, address)

    def _memcpy(self, handle: int) -> None:
        node = MemcpyNode(self.driver, handle)
        if not node.plain:
            self._hide("a copy of rows or arrays")
            return
        for offset, address in ((SOURCE, node.source), (TARGET, node.target)):
            if address is not None and (found := self._input_at(address)) is not None:
                self._relocation(node, offset, found, address)
        if node.host_source is not None:
            self._staged_at(node, HOST_SOURCE, node.host_source)
            try:
                for address in _host_words(node.host_source, node.nbytes, node.target or 0, self.placeholders):
                    self._refuse(self._near(address), Reason.IN_HOST_ARRAY())
            except OSError:
                self._hide("a copy from host memory that cannot be read")

    def _staged_at(self, node: GraphNode, offset: int, address: int) -> None:
        """Notes a node that copies staged inputs from an address, if they are there."""
        for number, (start, nbytes) in enumerate(self.staged):
            if start <= address < start + nbytes:
                self._held(node, offset, len(self.placeholders.placeholders) + number, address - start)

    def _memset(self, handle: int) -> None:
        node = MemsetNode(self.driver, handle)
        found = self._input_at(node.target)
        if not node.plain:
            self._refuse(found, Reason.FILLED_IN_ROWS())
        elif found is not None:
            self._relocation(node, 0, found, node.target)

    def _input_at(self, address: int) -> int | None:
        found = self._near(address)
        return None if found is None or self._is_far(found, address) else found

    def _is_far(self, near: int, address: int) -> bool:
        """Whether an address near an input may belong to any other, and so hides which."""
        if self.placeholders.placeholders[near].is_far_from(address):
            self._hide("a pointer far outside of every input")
            return True
        return False

    def _may_hold(self, pointers: Pointers, near: int, address: int) -> bool:
        """Whether a struct may hold an address near an input."""
        start, nbytes, *_ = self.placeholders.placeholders[near]
        is_inside = start <= address <= start + nbytes
        return address == self.recorded[near] if pointers is Pointers.FIRST else pointers is Pointers.ANY or is_inside

    def _near(self, address: int, *, is_alone: bool = True) -> int | None:
        """The input in whose range or guards an address is, at any distance from the input."""
        found, among = self.placeholders.find(address), self.placeholders
        if found is None and (among.may_be_between(address) or (is_alone and among.low <= address < among.high)):
            self._hide("a pointer far outside of every input")
        return found

    def _relocation(self, node: GraphNode, offset: int, found: int, address: int) -> None:
        self._held(node, offset, found, address - self.placeholders.placeholders[found].start)

    def _held(self, node: GraphNode, offset: int, number: int, addend: int) -> None:
        if not self.nodes or self.nodes[-1] is not node:
            self.nodes.append(node)
        self.relocations.append(Relocation(len(self.nodes) - 1, offset, number, addend))

    def _refuse(self, found: int | None, why: Why) -> None:
        if found is not None:
            self.refused.setdefault(found, why)

    def _hide(self, what: str, handle: int | None = None) -> None:
        """Notes what may hide addresses; if it is a node of known tensors, it hides none."""
        if handle is None or handle not in self.hide_nothing:
            self.opaque = self.opaque or what


def _words(data: bytes, placeholders: Placeholders) -> list[tuple[int, int]]:
    """Offset and value of each word among the placeholders, at all multiples of 4 bytes, by offset."""
    low, high = placeholders.low, placeholders.high
    found: list[tuple[int, int]] = []
    for begin in (0, 4):
        words = memoryview(data)[begin : begin + (len(data) - begin) // 8 * 8].cast("Q")
        found += [(begin + 8 * i, word) for i, word in enumerate(words) if low <= word < high]
    return sorted(found)


def _read_host(memory: int, target: memoryview, address: int) -> None:
    """Reads this process's memory; raises :class:`OSError` if it is not mapped."""
    with contextlib.suppress(OSError):  # pinned memory can be mapped such that the file cannot be read there (VM_IO)
        if os.preadv(memory, [target], address) == len(target):
            return
    if not _is_readable(address, address + len(target)):
        raise OSError(f"{len(target)} bytes at {address:#x} are not all mapped")
    target[:] = ctypes.string_at(address, len(target))


def _is_readable(begin: int, end: int) -> bool:
    """Whether a whole range is mapped for reading."""
    with open("/proc/self/maps", encoding="ascii", errors="replace") as lines:
        for line in lines:
            span, rights = line.split()[:2]
            first, last = (int(part, 16) for part in span.split("-"))
            if first <= begin < last and rights.startswith("r"):
                begin = last
    return begin >= end


def _host_words(start: int, nbytes: int, target: int, placeholders: Placeholders) -> Iterator[int]:
    """The words among the placeholders in this process's memory, aligned as they will be at ``target``."""
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
