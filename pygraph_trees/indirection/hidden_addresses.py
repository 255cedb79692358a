"""Checks at record time that no unknown kernel holds an input's address where a scan does not see it.

A :class:`Rehearsal` launches a graph before its first launch: once with all inputs copied to their placeholder
addresses, which is right by construction, then with inputs at their own addresses and other contents at the
placeholders. A kernel that hid an address reads those, or writes there. Outputs and written inputs must be equal bit by
bit, and what is at the placeholders unchanged. Memory and generators that a launch changes are put back; what a kernel
changes that nobody says it does is not known here.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from pygraph_trees.cuda.extent import contents, extent, flat

from .placeholder_tensors import bytes_at

_MOST_ALONE = 8  # inputs that are tried one by one, each for an instantiation and two launches
_MOST_NAMED = 3  # kernels in a reason
_MOST_CHARACTERS = 60  # of a kernel's name, which is mangled

_SAME_WIDTH = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_PLAIN_INTEGERS = {torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}
_NAN, _LARGE = 0xFF, 0x47  # bytes: not a number, and a large one, in all formats


class Item(Protocol):
    """An input with a placeholder tensor; see :class:`.inputs.Item`."""

    index: int
    lead: int
    nbytes: int
    placeholder_tensor: torch.Tensor
    mutated: bool


class Generator(Protocol):
    """What is used of a ``torch.Generator`` on the GPU."""

    def get_offset(self) -> int: ...

    def set_offset(self, offset: int) -> None: ...


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a launch reads and writes beside the inputs that have placeholder tensors."""

    outputs: Sequence[Any] = ()  # tensors and others; none lies on a placeholder tensor
    kept: Sequence[
        torch.Tensor
    ] = ()  # inputs that a launch may write over, in the graph pool or because it is asked to
    written: Sequence[torch.Tensor] = ()  # those of them that the function writes to
    generators: Sequence[Generator] = ()  # that a launch may draw from


def why_not_launched() -> str | None:
    """Why a graph with unknown kernels must not be launched more often than the program does; None where it may be."""
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1:
        return "which may wait for other processes"
    return None


class Rehearsal:
    """The launches of one graph before its first one.

    The constructor saves what they change and may raise ``torch.OutOfMemoryError``; :meth:`put_back` restores it.
    """

    def __init__(
        self,
        items: Sequence[Item],
        count: int,
        given: Callable[[int], torch.Tensor],
        surroundings: Surroundings,
        launch: Callable[[Collection[int]], None],
    ) -> None:
        """
        Args:
            items: those whose placeholder tensors the graph was recorded with, on the GPU.
            count: how many of them, the first ones, are at placeholder addresses; all have memory of their own there.
            given: the tensor of this call for an input's index.
            launch: launches the graph with those at these positions at their own addresses, all others at the
                addresses that were recorded, on the current stream.
        """
        self._items, self._count, self._given = items, count, given
        self._surroundings, self._launch = surroundings, launch
        self._offsets = [generator.get_offset() for generator in surroundings.generators]
        written = [given(item.index) for item in items[:count] if item.mutated]
        self._saved = [_Saved(tensor) for tensor in (*surroundings.kept, *written)]

    def put_back(self) -> None:
        """All that the launches have changed is as it was."""
        for saved in self._saved:
            saved.put_back()
        for generator, offset in zip(self._surroundings.generators, self._offsets, strict=True):
            if generator.get_offset() != offset:
                generator.set_offset(offset)

    def failing(self, positions: Sequence[int], unknown: Sequence[str]) -> dict[int, str]:
        """By position, why inputs that should be given by address cannot be.

        Args:
            unknown: the names of the kernels in question.
        """
        kernels = listed(unknown)
        try:
            wanted = self._as_recorded()
            if self._is_same(positions, wanted):
                return {}
            if not self._repeats(wanted):
                why = f"two equal launches give different results, and {kernels} may hide its address"
                return dict.fromkeys(positions, why)
            wrong = list(positions)
            if 1 < len(positions) <= _MOST_ALONE:
                wrong = [position for position in positions if not self._is_same([position], wanted)]
                others = [position for position in positions if position not in wrong]
                if not wrong or (others and not self._is_same(others, wanted)):
                    wrong = list(positions)
        except torch.OutOfMemoryError:
            why = f"there is no memory to check {kernels}, which may hide its address"
            return dict.fromkeys(positions, why)
        return dict.fromkeys(wrong, f"{kernels} may hide its address: with another one the results are different")

    def _prepare(self) -> None:
        """Memory as it was before, and the placeholder tensors hold what the inputs do."""
        self.put_back()
        for position, item in enumerate(self._items):
            given = self._given(item.index)
            if position < self._count:
                there = _whole(item)
                there.copy_(bytes_at(given.data_ptr() - item.lead, item.nbytes, given.device)[: there.numel()])
            else:
                flat(item.placeholder_tensor).copy_(flat(given))

    def _results(self, moved: Collection[int]) -> list[torch.Tensor]:
        """What the latest launch left behind, bytes each, in memory that the next one writes to."""
        outputs = [output for output in self._surroundings.outputs if _is_in_memory(output)]
        written = [
            self._given(item.index) if position in moved else item.placeholder_tensor
            for position, item in enumerate(self._items)
            if item.mutated
        ]
        return [contents(tensor) for tensor in (*outputs, *self._surroundings.written, *written)]

    def _as_recorded(self) -> list[torch.Tensor]:
        self._prepare()
        self._launch(())
        return [result.clone() for result in self._results(())]

    def _repeats(self, wanted: Sequence[torch.Tensor]) -> bool:
        self._prepare()
        self._launch(())
        return self._are_equal(self._results(()), wanted)

    def _is_same(self, moved: Sequence[int], wanted: Sequence[torch.Tensor]) -> bool:
        """Whether launches with inputs at their own addresses do the same, whatever is at their placeholders."""
        for number in range(2):
            self._prepare()
            fills = [_Fill.of(self._items[p], self._given(self._items[p].index), number) for p in moved]
            for fill in fills:
                fill.write()
            self._launch(moved)
            if not all(fill.is_there() for fill in fills):
                return False
            if not self._are_equal(self._results(moved), wanted):
                return False
        return True

    @staticmethod
    def _are_equal(found: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> bool:
        return all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))


class _Saved:
    """A tensor's elements, and where they were."""

    def __init__(self, tensor: torch.Tensor) -> None:
        nbytes = extent(tensor) * tensor.element_size()
        there = bytes_at(tensor.data_ptr(), nbytes, tensor.device).view(tensor.dtype)
        # What is between the elements of a view is somebody else's, who may write there meanwhile.
        if torch._debug_has_internal_overlap(tensor) != 1:
            there = there.as_strided(tensor.shape, tensor.stride())
        self._there, self._content = there, there.clone()

    def put_back(self) -> None:
        self._there.copy_(self._content)


@dataclass(frozen=True, slots=True)
class _Fill:
    """Other contents for a placeholder: one value everywhere."""

    there: torch.Tensor
    value: int

    @staticmethod
    def of(item: Item, given: torch.Tensor, number: int) -> _Fill:
        """The first or the second one: of two, each element differs from one at least.

        Integers stay valid as indices and as offsets: they are the smallest and the largest one that there are.
        """
        there, dtype = _whole(item), given.dtype
        if dtype is torch.bool:
            return _Fill(there, number)
        if dtype.is_floating_point or dtype.is_complex or dtype.itemsize not in _SAME_WIDTH:
            return _Fill(there, (_NAN, _LARGE)[number])
        there = there.view(dtype if dtype in _PLAIN_INTEGERS else _SAME_WIDTH[dtype.itemsize])
        nbytes = there.numel() * there.element_size()
        lowest, highest = _least_and_most(
            bytes_at(given.data_ptr() - item.lead, nbytes, given.device).view(there.dtype)
        )
        if lowest == highest:
            return _Fill(there, lowest - 1 if lowest > 0 else lowest + 1)
        return _Fill(there, (lowest, highest)[number])

    def write(self) -> None:
        self.there.fill_(self.value)

    def is_there(self) -> bool:
        return _least_and_most(self.there) == (self.value, self.value)


def _least_and_most(integers: torch.Tensor) -> tuple[int, int]:
    lowest, highest = torch.aminmax(integers)
    return int(lowest), int(highest)


def _whole(item: Item) -> torch.Tensor:
    """The bytes of a placeholder, in whole elements."""
    placeholder_tensor = item.placeholder_tensor
    count = item.nbytes // placeholder_tensor.element_size()
    begin = placeholder_tensor.storage_offset() - item.lead // placeholder_tensor.element_size()
    return placeholder_tensor.as_strided((count,), (1,), begin).view(torch.uint8)


def _is_in_memory(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.layout is torch.strided and value.numel() > 0


def listed(names: Sequence[str]) -> str:
    """Some names of kernels, as they stand in a sentence."""
    shown = [name if len(name) <= _MOST_CHARACTERS else f"{name[:_MOST_CHARACTERS]}..." for name in names]
    more = [f"{len(shown) - _MOST_NAMED} more"] if len(shown) > _MOST_NAMED else []
    return " or ".join(shown[:_MOST_NAMED] + more)
