"""Units of a captured graph, made from its operations and from the addresses that its nodes hold.

An address in a declared storage is used as declared. Any other one may belong to a temporary, so all memory between the
storages that are alive counts as written. README.md has the rules.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from pygraph_trees.cuda.copy_nodes import MemcpyNode, MemsetNode
from pygraph_trees.cuda.driver import Driver
from pygraph_trees.cuda.edges import Edge
from pygraph_trees.cuda.graph_nodes import KernelNode, Layouts, NodeKind
from pygraph_trees.errors import DriverError, InvalidValue, PygraphError
from pygraph_trees.indirection.known_kernels import is_known
from pygraph_trees.reasons import Reason

from .operations import Operation
from .units import Access, Range, Regions, Unit

# Kernels that hide no input from a scan, but may read addresses in tables that another kernel makes (grouped matmuls).
_READS_TABLES = re.compile(r"_ZN7cutlass\w*IN2at4cuda|.*[gG]rouped_?[gG]emm")
# A byte where nothing is: it stands for the memory of any input, since inputs of a later call may overlap.
_ANY_INPUT: Range = (0, 1)


class NoBranches(PygraphError):
    template = "{why}"


class _Unknown(Exception):
    """A node may access anything."""


def units_of(
    driver: Driver, nodes: Sequence[int], edges: Iterable[Edge], operations: Sequence[Operation], inputs: Regions
) -> list[Unit]:
    """The units of a graph that still captures, with these nodes and edges, in the captured order.

    ``inputs``: the memory of inputs that another call may pass elsewhere. Raises :class:`NoBranches` if the graph must
    keep its edges, and :class:`DriverError` if it cannot be read.
    """
    reader = _Reader(driver, inputs)
    return [reader.unit(part, operation) for part, operation in _parts(nodes, edges, operations)]


def _parts(
    nodes: Sequence[int], edges: Iterable[Edge], operations: Sequence[Operation]
) -> Iterator[tuple[tuple[int, ...], Operation | None]]:
    """Each operation with its nodes; for None, the nodes between two operations."""
    before = defaultdict(list)
    for edge in edges:
        before[edge.after].append(edge.before)
    left = set(nodes)

    def until(last: Iterable[int]) -> tuple[int, ...]:
        """The nodes up to these that are in no part yet."""
        todo, found = [*last], set()
        while todo:
            if (node := todo.pop()) in left:
                left.remove(node)
                found.add(node)
                todo += before[node]
        return tuple(node for node in nodes if node in found) if found else ()

    for operation in operations:
        for last, owner in ((operation.before, None), (operation.after, operation)):
            if part := until(last):
                yield part, owner
    if part := until(nodes):
        yield part, None


class _Reader:
    """Reads the nodes of one graph."""

    def __init__(self, driver: Driver, inputs: Regions) -> None:
        self._driver, self._inputs = driver, inputs
        self._layouts: Layouts = {}
        self._allocations: dict[int, Range | None] = {}  # by address

    def unit(self, nodes: tuple[int, ...], operation: Operation | None) -> Unit:
        kinds = [self._driver.node_kind(node) for node in nodes]
        if not {NodeKind.MEM_ALLOC, NodeKind.MEM_FREE}.isdisjoint(kinds):
            raise NoBranches(why=Reason.ALLOCATES())
        if operation is None:
            return Unit(nodes, barrier=True)
        barrier = Unit(nodes, barrier=True, lane=operation.lane, nbytes=operation.nbytes)
        if not operation.known:
            return barrier
        found = dict.fromkeys(operation.declared)
        try:
            for node, kind in zip(nodes, kinds, strict=True):
                found |= dict.fromkeys(self._of_node(node, kind, operation))
        except (DriverError, _Unknown):
            return barrier
        if on_inputs := [access for access in found if self._inputs.overlap(access.start, access.end)]:
            found[Access(*_ANY_INPUT, any(access.write for access in on_inputs))] = None
        return Unit(nodes, tuple(found), lane=operation.lane, nbytes=operation.nbytes)

    def _of_node(self, node: int, kind: NodeKind, operation: Operation) -> Iterator[Access]:
        if kind is NodeKind.KERNEL:
            yield from self._of_kernel(node, operation)
        elif kind is NodeKind.MEMSET:
            yield self._at(MemsetNode(self._driver, node).target, operation, write=True)
        elif kind is NodeKind.MEMCPY:
            copy = MemcpyNode(self._driver, node)
            if copy.target is None or (copy.source is None and copy.host_source is None):
                raise _Unknown
            if copy.host_source is not None:
                yield Access(copy.host_source, copy.host_source + copy.nbytes, False)
            elif copy.source is not None:
                yield self._at(copy.source, operation, write=False)
            yield self._at(copy.target, operation, write=True)
        elif kind is not NodeKind.EMPTY:
            raise _Unknown

    def _of_kernel(self, handle: int, operation: Operation) -> Iterator[Access]:
        node = KernelNode(self._driver, handle, self._layouts)
        name = self._driver.function_name(node.function, node.kernel)
        if name is None or not is_known(name) or _READS_TABLES.match(name) or self._waits_for_all_blocks(handle):
            raise _Unknown
        words = node.words()
        for offset in range(0, len(words) - 7, 4):
            address = int.from_bytes(words[offset : offset + 8], "little")
            storage = operation.alive.holding(address)
            if storage is not None and any(a.start <= address < a.end for a in operation.declared):
                continue
            if node.may_be_address(offset) and (memory := storage or self._gap(address, operation.alive)) is not None:
                yield Access(*memory, True)

    def _at(self, address: int, operation: Operation, *, write: bool) -> Access:
        if (memory := operation.alive.holding(address) or self._gap(address, operation.alive)) is None:
            raise _Unknown
        return Access(*memory, write)

    def _gap(self, address: int, alive: Regions) -> Range | None:
        """All memory that may belong to the same temporary; None if there is no memory."""
        if (allocation := self._allocation(address)) is None:
            return None
        start, end = alive.around(address)
        return max(start, allocation[0]), min(end, allocation[1])

    def _allocation(self, address: int) -> Range | None:
        """What the driver allocated or reserved around an address, on the GPU or pinned; None if it knows none."""
        if address not in self._allocations:
            attributes = self._driver.api.CUpointer_attribute
            names = attributes.CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, attributes.CU_POINTER_ATTRIBUTE_RANGE_SIZE
            try:
                start, nbytes = (int(self._driver.call("cuPointerGetAttribute", name, address)[0]) for name in names)
            except InvalidValue:
                self._allocations[address] = None
            else:
                if not start <= address < start + nbytes:
                    raise _Unknown
                self._allocations[address] = start, start + nbytes
        return self._allocations[address]

    def _waits_for_all_blocks(self, handle: int) -> bool:
        """Whether all blocks of a kernel must be resident together; two such kernels side by side could deadlock."""
        attribute = self._driver.api.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_COOPERATIVE
        (value,) = self._driver.call("cuGraphKernelNodeGetAttribute", handle, attribute)
        return bool(value.cooperative)
