"""Patching: which addresses of its inputs an instantiated graph holds, and giving it others between two replays.

In goes what a scan found: the nodes that hold an address and the relocations in them, the inputs that are to be
patched, and the executable graph made from the scanned one. :meth:`Patches.apply` then makes the executable hold the
addresses that it is given: it writes them into our copy of each node's parameters and sets each node touched once.
Launches that are queued already keep the values that they were queued with.

- Only what changed since the last call is written and set; where nothing did, ``apply`` is one comparison of lists.
- Memcpy and memset nodes are the exception: they hold the allocation behind an address, which may be another one at the
  same address, so those with a patched relocation are set every time; and they must be instantiated on memory of the
  kind that they will be given (:class:`CapturedCopies`).
- Relocations of inputs that are not patched keep what they held when the graph was recorded, also in a node that is
  set.
- After a failure, or an interrupt, some nodes hold new addresses and some old ones. The executable must not be launched
  again: ``broken`` stays true, and every later ``apply`` raises :class:`HalfPatched`.

Addresses are device addresses in bytes, as integers; node handles belong to the scanned graph, which must outlive this.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import operator
import struct
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, cast

from pygraph_trees.cuda.driver import SetRefused
from pygraph_trees.cuda.graph_nodes import CopyNode, GraphNode, KernelNode, MemcpyNode
from pygraph_trees.errors import DriverError, PygraphError
from pygraph_trees.native import tensors

from .relocations import HOST_SOURCE, SOURCE

if TYPE_CHECKING:
    from pygraph_trees.cuda.driver import Driver

    from .relocations import Relocation


_MOST_CHANGES = 64  # sets of inputs that change together


class PatchFailed(PygraphError):
    template = "{call} refused an address of input {index}: {code}"


class HalfPatched(PatchFailed):
    template = "an earlier change of addresses failed half-way; the graph must be recorded again"


class Word(Protocol):
    """Where an address is written; a ``ctypes.c_uint64`` in a kernel's parameters is one."""

    value: Any


class _Field:
    """A word that is an attribute of a node."""

    __slots__ = ("_name", "_node")

    def __init__(self, node: GraphNode, name: str) -> None:
        self._node, self._name = node, name

    @property
    def value(self) -> Any:
        return getattr(self._node, self._name)

    @value.setter
    def value(self, address: Any) -> None:
        setattr(self._node, self._name, address)


@dataclass(frozen=True, slots=True)
class _Change:
    """The nodes that are set where some inputs change."""

    count: int
    set_kernels: Callable[[], None] | None  # sets those of ``kernels``
    kernels: tuple[int, ...]  # positions in the scan
    others: tuple[int, ...]  # set one by one


class Patches:
    """The relocations of one instantiated graph, and the addresses they hold."""

    __slots__ = ("__dict__", "__weakref__", "addresses", "broken", "is_stuck", "set_calls")  # what C++ looks at

    addresses: list[int]  # what the graph holds now, by position in ``inputs``; meaningless where broken
    broken: bool  # the graph must not be launched again
    is_stuck: bool  # because the driver refused an address, and to take the others back
    set_calls: int  # by all calls of ``apply`` that succeeded

    def __init__(
        self,
        driver: Driver,
        scan_nodes: Sequence[GraphNode],
        relocations: Sequence[Relocation],
        inputs: Sequence[int],
        exec_: int,
        context: Any,
        recorded: Sequence[int],
    ) -> None:
        """``inputs``: the placeholders to patch; ``recorded``: the addresses that ``exec_`` has, by position in
        ``inputs``.

        The nodes become this object's own: nobody else may write or bind them. Raises :class:`DriverError` where a
        call is missing, :class:`ValueError` where an input is given twice or without an address.
        """
        if not len(set(inputs)) == len(inputs) == len(recorded):
            raise ValueError(f"each input once, and an address for each: got {inputs!r} at {recorded!r}")
        self.addresses = list(recorded)
        self.broken = self.is_stuck = False
        self.set_calls = 0
        self._inputs = tuple(inputs)
        positions = {index: position for position, index in enumerate(inputs)}
        # Addresses as most kernels take them, position in inputs and what is added: written once, whoever reads them.
        entries: dict[tuple[int, int], int] = {}
        own: list[tuple[int, int, int, int, int]] = []  # a relocation with its input's position and its entry
        for number, offset, index, addend in relocations:
            position = positions.get(index)
            if position is not None:
                own.append((number, offset, position, addend, entries.setdefault((position, addend), len(entries))))
        self._entries = tuple(entries)
        self._table = (ctypes.c_uint64 * len(self._entries))()
        self._pack = struct.Struct(f"{len(self._entries)}Q").pack_into
        self._is_table = self._entries == tuple((position, 0) for position in range(len(inputs)))
        # By position in inputs: the other words that hold its address with what is added, and its nodes' positions.
        self._words: list[list[tuple[Word, int]]] = [[] for _ in inputs]
        self._nodes: list[set[int]] = [set() for _ in inputs]
        self._always: set[int] = set()
        kernels: dict[int, KernelNode] = {}
        for number, offset, position, addend, entry in own:
            node = scan_nodes[number]
            self._nodes[position].add(number)
            if isinstance(node, KernelNode):
                kernels[number] = node
                if node.take_from(offset, self._table, entry):
                    continue
            elif offset != HOST_SOURCE:  # a staging buffer's memory stays where it is; for the program's own, ``anew``
                self._always.add(number)
            self._words[position].append((_word(node, offset), addend))
        self._has_words = any(self._words)
        self._positions = range(len(inputs))
        self._all = set().union(*self._nodes)
        for number in self._all:
            scan_nodes[number].bind(exec_, context)
        self._setters = {number: scan_nodes[number].set for number in self._all}
        self._kernels = kernels
        self._set_at_once = functools.partial(driver.set_kernels, exec_)
        self._exec, self._setter, self._context_getter = int(exec_), driver.kernel_setter, driver.context_getter
        self._context, self._go_back_to = context, driver.enter
        self._enter = functools.partial(driver.enter, context)
        # By what changes, positions in inputs: most often it is the same again. All have a place of their own.
        self._changes: dict[tuple[int, ...], _Change] = {}
        self._all_changed = self._change(self._all)
        # Whether new addresses for all inputs are written and set by one call each.
        self._at_once = self._is_table and not (self._has_words or self._all_changed.others)
        self._write(range(len(inputs)), recorded)

    def _change(self, nodes: Collection[int]) -> _Change:
        """How these are set: kernels at once, where that can be."""
        kernels = tuple(number for number in self._kernels if number in nodes)
        set_kernels = self._set_at_once(tuple(self._kernels[number] for number in kernels)) if kernels else None
        others = [number for number in nodes if set_kernels is None or number not in self._kernels]
        return _Change(len(nodes), set_kernels, kernels, tuple(others))

    def patcher(self, ask_every: int = 0) -> Any:
        """What gives kernels new addresses in C++ (``native/patch.cpp``); None where there are other nodes as well.

        ``ask_every``: it leaves every so many calls to Python; 0 for none of them.
        """
        change = self._all_changed
        if tensors.extension is None or change.others or not change.kernels:
            return None
        setter, context_getter = self._setter(), self._context_getter()
        if setter is None or context_getter is None or self._context is None:
            return None
        table = ctypes.addressof(self._table)
        words = [(table + 8 * number, *entry) for number, entry in enumerate(self._entries)]
        for position, found in enumerate(self._words):
            words += [(ctypes.addressof(cast("ctypes.c_uint64", word)), position, addend) for word, addend in found]
        numbers = {node: number for number, node in enumerate(change.kernels)}
        nodes = [self._kernels[node] for node in change.kernels]
        holders = [(position, numbers[node]) for position, held in enumerate(self._nodes) for node in sorted(held)]
        return tensors.extension.Patcher(
            patches=self,
            words=tensors.packed([number % 2**64 for word in words for number in word]),
            nodes=tensors.packed([number for node in nodes for number in (node.handle, node.address)]),
            holders=tensors.packed([number for holder in holders for number in holder]),
            inputs=len(self.addresses),
            exec=self._exec,
            set=setter,
            get_context=context_getter,
            context=int(self._context),
            ask_every=ask_every,
        )

    @property
    def sets_always(self) -> bool:
        """Whether there are nodes that are set even where nothing changed."""
        return bool(self._always)

    def apply(self, addresses: Sequence[int], anew: Collection[int] = ()) -> int:
        """Makes the graph hold these, by position in ``inputs``; returns how many nodes were set.

        ``anew``: positions that are set though the address is what it was, since other memory may be there.

        Raises :class:`PatchFailed` where the driver refuses, and then the graph is broken; :class:`ValueError` where
        there is not one for each input.
        """
        if self.broken:
            raise HalfPatched
        if addresses == self.addresses and not self._always and not anew:
            return 0
        if len(addresses) != len(self.addresses):
            raise ValueError(f"{len(self.addresses)} addresses, not {len(addresses)}")
        self.broken = True  # until all is done: an interrupt may come anywhere
        change = self._all_changed
        if not all(map(operator.ne, addresses, self.addresses)):
            moved: Iterable[bool] = map(operator.ne, addresses, self.addresses)
            if anew:
                moved = [position in anew or differs for position, differs in enumerate(moved)]
            changed = tuple(itertools.compress(self._positions, moved))
            change = self._changes.get(changed) or self._remember(changed)
            self._write(changed, addresses)
        elif self._at_once:
            self._pack(self._table, 0, *addresses)
        else:
            self._write(self._positions, addresses)
        self._set(addresses, change)
        self.addresses[:] = addresses
        self.set_calls += change.count
        self.broken = False
        return change.count

    def _remember(self, changed: tuple[int, ...]) -> _Change:
        if len(self._changes) == _MOST_CHANGES:
            self._changes.clear()
        nodes = self._always.union(*(self._nodes[position] for position in changed))
        found = self._changes[changed] = self._change(nodes)
        return found

    def _set(self, addresses: Sequence[int], change: _Change) -> None:
        node, before = -1, None
        try:
            before = None if self._context is None else self._enter()
            if change.set_kernels is not None:
                change.set_kernels()
            for node in change.others:
                self._setters[node]()
        except DriverError as error:
            if isinstance(error, SetRefused):
                node = change.kernels[error.fields["position"]]
            index = self._input_of(node, addresses)
            raise PatchFailed(index=index, call=error.fields["call"], code=error.fields["code"]) from error
        finally:
            if before is not None:
                self._go_back_to(before)

    def _write(self, changed: Iterable[int], addresses: Sequence[int]) -> None:
        # A table that is just the addresses is the usual case.
        values = addresses if self._is_table else [addresses[position] + addend for position, addend in self._entries]
        self._pack(self._table, 0, *values)
        for position in changed if self._has_words else ():
            for word, addend in self._words[position]:
                word.value = addresses[position] + addend

    def _input_of(self, node: int, addresses: Sequence[int]) -> int:
        """An input with a relocation in this node, one whose address changes if there is one."""
        users = [position for position, nodes in enumerate(self._nodes) if node in nodes]
        changed = [position for position in users if addresses[position] != self.addresses[position]]
        return self._inputs[(changed or users or self._positions)[0]]


class CapturedCopies:
    """The copies and fills of a captured graph that hold addresses of its inputs, before it is instantiated.

    Instantiated on placeholders, they would take no address in memory of another kind.
    """

    def __init__(self, scan_nodes: Sequence[GraphNode], relocations: Sequence[Relocation]) -> None:
        # Node, placeholder, where its address is, what is added to it.
        self._words: list[tuple[CopyNode, int, Word, int]] = []
        for relocation in relocations:
            node = scan_nodes[relocation.node]
            if isinstance(node, CopyNode):
                self._words.append((node, relocation.input, _word(node, relocation.offset), relocation.addend))
        self._pointed: list[CopyNode] = []

    def point(self, addresses: Mapping[int, int]) -> None:
        """Makes them hold addresses, by placeholder. Raises :class:`DriverError`; then some may hold them."""
        for node in self._write(addresses):
            node.set_captured()
            self._pointed.append(node)

    def point_back(self, recorded: Mapping[int, int]) -> None:
        """Makes those that were pointed elsewhere hold the addresses that they were recorded with, buffers' too."""
        self._write(recorded)
        while self._pointed:
            self._pointed[-1].set_captured()
            self._pointed.pop()

    def _write(self, addresses: Mapping[int, int]) -> list[CopyNode]:
        written = [
            (node, word, addresses[placeholder] + by)
            for node, placeholder, word, by in self._words
            if placeholder in addresses
        ]
        for _, word, address in written:
            word.value = address
        return list(dict.fromkeys(node for node, _, _ in written))


def _word(node: GraphNode, offset: int) -> Word:
    """A relocation's place in its node (see ``Relocation.offset``)."""
    if isinstance(node, KernelNode):
        return node.word(offset)
    name = {SOURCE: "source", HOST_SOURCE: "host_source"}.get(offset, "target")
    return _Field(node, name if isinstance(node, MemcpyNode) else "target")
