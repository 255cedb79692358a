"""Patching: gives an instantiated graph other addresses of its inputs between two replays.

:class:`Patches` takes a scan's nodes and relocations, the inputs to patch and the executable graph.
:meth:`Patches.apply` writes changed addresses into copies of the nodes' parameters and sets each changed node once;
queued launches keep their values. The scanned graph must outlive it. After a failure or an interrupt, ``broken`` stays
true, every later ``apply`` raises :class:`HalfPatched`, and the graph must not be launched.
"""

from __future__ import annotations

import ctypes
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch

from pygraph_trees.cuda.copy_nodes import HOST_SOURCE, CopyNode
from pygraph_trees.cuda.driver import CONTEXT_GETTER, KERNEL_SETTER, Driver
from pygraph_trees.cuda.graph_nodes import GraphNode, KernelNode
from pygraph_trees.cuda.value_kernel import BYTES
from pygraph_trees.errors import DriverError, PygraphError
from pygraph_trees.native import binding
from pygraph_trees.reasons import Reason

from .relocations import BY_VALUE, Relocation


class PatchFailed(PygraphError):
    template = Reason.PATCH_FAILED.value


class HalfPatched(PatchFailed):
    template = "an earlier change of addresses failed half-way; the graph must be recorded again"


class Patches:
    """The relocations of one instantiated graph, and the addresses they hold."""

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
        """The nodes become this object's own: no other code may write or bind them.

        Args:
            inputs: the placeholders to patch.
            recorded: the addresses that ``exec_`` holds, by position in ``inputs``.
        """
        self._addresses = list(recorded)
        self._is_broken = False
        self.sets = binding.new_counter()  # nodes set so far by changes that succeeded
        self._native: Any = None  # sets nodes too
        self._inputs = tuple(inputs)
        positions = {index: position for position, index in enumerate(inputs)}
        # By position in inputs: the words that hold its address, with the addend, and the nodes that hold it.
        self._words: list[list[tuple[Any, int]]] = [[] for _ in inputs]
        self._nodes: list[set[int]] = [set() for _ in inputs]
        self.always: set[int] = set()  # nodes that are set even if nothing changed
        for number, offset, index, addend in relocations:
            if (position := positions.get(index)) is None:
                continue
            node = scan_nodes[number]
            self._nodes[position].add(number)
            # A staging buffer keeps its address; the program's own memory is in ``forced``.
            if isinstance(node, CopyNode) and offset != HOST_SOURCE:
                self.always.add(number)
            self._words[position].append((_word(node, offset), addend))
        self._used = {number: scan_nodes[number] for number in sorted(set().union(*self._nodes))}
        self._driver, self._context = driver, context
        self._bind(exec_)
        self._write(range(len(inputs)), recorded)
        self._is_new = False  # whether the graph was instantiated again, and holds no address yet

    def _bind(self, exec_: int) -> None:
        for node in self._used.values():
            node.bind(exec_, self._context)
        self._exec = int(exec_)

    def unbind(self) -> None:
        """Marks the instantiation as unusable: torch destroys it before it makes the next one, which may fail."""
        self._is_broken = True
        if self._native is not None:
            self._native.unsettle()

    def rebind(self, exec_: int) -> None:
        """Takes another instantiation of the graph, all of whose nodes the next :meth:`apply` sets."""
        self._is_new = True
        self._bind(exec_)
        if self._native is not None:
            self._native.rebind(self._exec)
        self._is_broken = False

    @property
    def addresses(self) -> list[int]:
        """What the graph holds now, by position in ``inputs``; meaningless if broken."""
        if self._native is not None:
            self._addresses[:] = self._native.held
        return self._addresses

    @property
    def broken(self) -> bool:
        """Whether the graph must not be launched again."""
        return self._is_broken or self.is_stuck

    @property
    def is_stuck(self) -> bool:
        """Whether the driver refused an address on the fast path, and then refused to restore the others."""
        return self._native is not None and self._native.is_stuck

    def native(
        self,
        pool_changes: Any,
        count: int,
        values: Sequence[tuple[int, torch.Tensor, bool]] = (),
        own: Sequence[int] = (),
    ) -> Any:
        """The addresses in C++ for the fast path (``native/addresses.cpp``); None without the native parts.

        It sets no node, and so knows only addresses that the graph holds already, if nodes other than kernels hold
        addresses; then it is None if there are values. All inputs must be patched.

        Args:
            pool_changes, count, values, own: as for the class in C++; see ``native/DESIGN.md``.
        """
        if binding.extension is None:
            return None
        kernels = {number: node for number, node in self._used.items() if isinstance(node, KernelNode)}
        setter, context_getter = map(self._driver.address_of, (KERNEL_SETTER, CONTEXT_GETTER))
        has_calls = setter and context_getter and self._context is not None
        can_set = has_calls and 0 < len(kernels) == len(self._used)
        if values and not can_set:
            return None
        nodes = list(kernels.values()) if can_set else []
        numbers = {node: number for number, node in enumerate(kernels)}
        all_words, all_nodes = (self._words, self._nodes) if can_set else ((), ())
        self._native = binding.extension.Addresses(
            owner=(nodes, self._words),
            pool_changes=pool_changes,
            sets=self.sets,
            held=self._addresses,
            own=own,
            words=[
                (ctypes.addressof(word), position, addend % 2**64)
                for position, found in enumerate(all_words)
                for word, addend in found
            ],
            nodes=[(node.handle, node.address) for node in nodes],
            holders=[(position, numbers[node]) for position, held in enumerate(all_nodes) for node in sorted(held)],
            exec=self._exec,
            set=setter or 0,
            get_context=context_getter or 0,
            context=int(self._context) if can_set else 0,
            count=count,
            values=values,
        )
        return self._native

    def apply(self, addresses: Sequence[int], forced: Collection[int] = ()) -> int:
        """Makes the graph hold ``addresses``, by position in ``inputs``; returns how many nodes were set.

        Args:
            forced: positions that are set even if the address is unchanged: other memory may have the same address.

        Raises :class:`PatchFailed` if the driver refuses, which leaves the graph broken.
        """
        if self.broken:
            raise HalfPatched
        pairs = zip(addresses, self.addresses, strict=True)
        changed = [p for p, (new, old) in enumerate(pairs) if self._is_new or new != old or p in forced]
        if not changed and not self.always:
            return 0
        self._is_broken = True  # until all is done: an interrupt may come anywhere
        nodes = self.always.union(*(self._nodes[position] for position in changed))
        self._write(changed, addresses)
        self._set(addresses, nodes)
        self._addresses[:] = addresses
        if self._native is not None:
            self._native.hold(self._addresses)
        self.sets.value += len(nodes)
        self._is_broken = self._is_new = False
        return len(nodes)

    def _set(self, addresses: Sequence[int], nodes: Iterable[int]) -> None:
        node, before = -1, None
        try:
            before = None if self._context is None else self._driver.enter(self._context)
            for node in nodes:
                self._used[node].set()
        except DriverError as error:
            index = self._input_of(node, addresses)
            raise PatchFailed(index=index, call=error.fields["call"], code=error.fields["code"]) from error
        finally:
            if before is not None:
                self._driver.enter(before)

    def _write(self, changed: Iterable[int], addresses: Sequence[int]) -> None:
        for position in changed:
            for word, addend in self._words[position]:
                word.value = addresses[position] + addend

    def _input_of(self, node: int, addresses: Sequence[int]) -> int:
        """An input with a relocation in this node; if possible, one whose address changes."""
        users = [position for position, nodes in enumerate(self._nodes) if node in nodes]
        changed = [position for position in users if addresses[position] != self._addresses[position]]
        return self._inputs[(changed or users or [0])[0]]


class CapturedCopies:
    """A captured graph's copies and fills; instantiated on placeholders, they would refuse memory of another kind."""

    def __init__(self, scan_nodes: Sequence[GraphNode], relocations: Sequence[Relocation]) -> None:
        # Node, placeholder, the word that holds its address, addend.
        self._words: list[tuple[CopyNode, int, Any, int]] = []
        for relocation in relocations:
            node = scan_nodes[relocation.node]
            if isinstance(node, CopyNode):
                self._words.append((node, relocation.input, _word(node, relocation.offset), relocation.addend))
        self._pointed: list[CopyNode] = []

    def point(self, addresses: Mapping[int, int]) -> None:
        """Gives the nodes new addresses, by placeholder. After a :class:`DriverError`, some nodes hold new ones."""
        for node in self._write(addresses):
            node.set_captured()
            self._pointed.append(node)

    def point_back(self, recorded: Mapping[int, int]) -> None:
        """Restores the recorded addresses, staging buffers' included, in the nodes that :meth:`point` changed."""
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


def _word(node: Any, offset: int) -> Any:
    """The word of a node at a relocation's offset (see ``Relocation.offset``)."""
    return node.pointer(BYTES) if offset == BY_VALUE else node.word(offset)
