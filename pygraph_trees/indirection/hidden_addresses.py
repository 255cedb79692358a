"""Checks, when a graph is recorded, that no unknown kernel holds an input's address in a form that a scan misses.

A :class:`Rehearsal` launches the graph with all inputs at their placeholder addresses, then with inputs at their own
addresses and other contents at the placeholders. An input for which the results differ (:mod:`.spread`), or the
contents change, cannot be given by address. Declared changes of memory and generators are undone; undeclared ones are
not noticed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from pygraph_trees.cuda.extent import extent, flat

from .placeholder_tensors import bytes_at
from .spread import Expected, is_number

_MOST_ALONE = 8  # inputs that are tried one by one, each for an instantiation and two launches
_MOST_NAMED = 3  # kernels in a reason
_MOST_CHARACTERS = 60  # of a kernel's name, which is mangled

_SAME_WIDTH = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_PLAIN_INTEGERS = {torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}
_EQUAL_LAUNCHES = 4  # whose results are compared before an input is copied
# Bytes; repeated, they are not a number, a large number and a large negative one in all formats.
_NAN, _LARGE, _NEGATIVE = 0xFF, 0x47, 0xC7


class Item(Protocol):
    """An input with a placeholder tensor; see :class:`.inputs.Item`."""

    index: int
    lead: int
    nbytes: int
    placeholder_tensor: torch.Tensor
    mutated: bool


class Generator(Protocol):
    """The methods of a ``torch.Generator`` on the GPU that are used here."""

    def get_offset(self) -> int: ...

    def set_offset(self, offset: int) -> None: ...


@dataclass(frozen=True, slots=True)
class Surroundings:
    """Values that a launch reads and writes besides the inputs that have placeholder tensors."""

    outputs: Sequence[Any] = ()  # tensors and other values; none is in the memory of a placeholder tensor
    kept: Sequence[
        torch.Tensor
    ] = ()  # inputs that a launch may overwrite: they are in the graph pool, or the function mutates them
    written: Sequence[torch.Tensor] = ()  # those of ``kept`` that the function mutates
    generators: Sequence[Generator] = ()  # generators that a launch may draw from


def why_not_launched() -> str | None:
    """Why a graph with unknown kernels must not be launched more often than the program does; None if it may be."""
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1:
        return "which may wait for other processes"
    return None


class Rehearsal:
    """Launches of one graph before the program's first one.

    The constructor saves the memory that these launches change and may raise ``torch.OutOfMemoryError``;
    :meth:`put_back` restores it.
    """

    def __init__(
        self,
        items: Sequence[Item],
        count: int,
        given: Callable[[int], torch.Tensor],
        surroundings: Surroundings,
        launch: Callable[[Collection[int]], None],
        own: Collection[int] = (),
    ) -> None:
        """
        Args:
            items: the inputs on the GPU with whose placeholder tensors the graph was recorded.
            count: how many of them, from the first on, are at placeholder addresses, each with its own memory.
            given: returns this call's tensor for an input's index.
            launch: launches the graph on the current stream, with the inputs at the given positions at their own
                addresses and all others at their recorded addresses.
            own: the positions of own memory of outputs, which is written and not read.
        """
        self._items, self._count, self._given = items, count, given
        self._surroundings, self._launch, self._own = surroundings, launch, own
        self._offsets = [generator.get_offset() for generator in surroundings.generators]
        written = [given(item.index) for item in items[:count] if item.mutated]
        self._saved = [_Saved(tensor) for tensor in (*surroundings.kept, *written)]

    def put_back(self) -> None:
        """Restores everything that the launches have changed."""
        for saved in self._saved:
            saved.put_back()
        for generator, offset in zip(self._surroundings.generators, self._offsets, strict=True):
            if generator.get_offset() != offset:
                generator.set_offset(offset)

    def failing(self, positions: Sequence[int], unknown: Sequence[str]) -> dict[int, str]:
        """By position, why an input that should be given by address cannot be.

        Args:
            unknown: the names of the unknown kernels.
        """
        kernels = listed(unknown)
        differ = f"two equal launches give different results, and {kernels} may hide its address"
        fails: dict[int, str] = {}
        try:
            self._launch_as_recorded()
            expected = Expected(self._results(()))
            if self._is_same(positions, expected):
                return {}
            for _ in range(_EQUAL_LAUNCHES - 1):
                self._launch_as_recorded()
                expected.widen(self._results(()))
            if not expected.is_exact:
                is_rounded = expected.differs_by_rounding()
                shown = [position for position in positions if is_rounded and self._shows(position)]
                fails = dict.fromkeys((position for position in positions if position not in shown), differ)
                if not shown or self._is_same(shown, expected):
                    return fails
                positions = shown
            wrong = list(positions)
            if 1 < len(positions) <= _MOST_ALONE:
                wrong = [position for position in positions if not self._is_same([position], expected)]
                others = [position for position in positions if position not in wrong]
                if not wrong or (others and not self._is_same(others, expected)):
                    wrong = list(positions)
        except torch.OutOfMemoryError:
            why = f"there is no memory to check {kernels}, which may hide its address"
            return dict.fromkeys([*fails, *positions], why)
        why = f"{kernels} may hide its address: with another one the results are different"
        return fails | dict.fromkeys(wrong, why)

    def _shows(self, position: int) -> bool:
        """Whether results that differ by rounding would show that a launch still uses an input's placeholder.

        A NaN stays one in sums and products, whatever the factors. A maximum, comparison or selection may drop it, but
        then a large number of one sign or the other changes the result. This fails only if the change is scaled down
        below the spread. Integers have no NaN, so they would not show it. Nor would an input that is added to: the
        sum may be too small to change a large number, or to be missed in the input.
        """
        item = self._items[position]
        is_changed = item.mutated and position not in self._own
        return is_number(item.placeholder_tensor.dtype) and not is_changed

    def _prepare(self) -> None:
        """Restores memory and copies the inputs to their placeholder tensors."""
        self.put_back()
        for position, item in enumerate(self._items):
            given = self._given(item.index)
            if position < self._count:
                there = _whole(item)
                there.copy_(bytes_at(given.data_ptr() - item.lead, item.nbytes, given.device)[: there.numel()])
            else:
                flat(item.placeholder_tensor).copy_(flat(given))

    def _results(self, moved: Collection[int]) -> list[torch.Tensor]:
        """The results of the latest launch; the next launch overwrites them."""
        outputs = [output for output in self._surroundings.outputs if _is_in_memory(output)]
        written = [
            self._given(item.index) if position in moved else item.placeholder_tensor
            for position, item in enumerate(self._items)
            if item.mutated
        ]
        return [*outputs, *self._surroundings.written, *written]

    def _launch_as_recorded(self) -> None:
        self._prepare()
        self._launch(())

    def _is_same(self, moved: Sequence[int], expected: Expected) -> bool:
        """Whether launches with inputs at their own addresses give these results, whatever the placeholders hold."""
        for number in range(2 if expected.is_exact else 3):
            self._prepare()
            fills = [_Fill.of(self._items[p], self._given(self._items[p].index), number) for p in moved]
            for fill in fills:
                fill.write()
            self._launch(moved)
            if not all(fill.is_there() for fill in fills) or not expected.includes(self._results(moved)):
                return False
        return True


class _Saved:
    """A copy of a tensor's elements, and where to restore them."""

    def __init__(self, tensor: torch.Tensor) -> None:
        nbytes = extent(tensor) * tensor.element_size()
        there = bytes_at(tensor.data_ptr(), nbytes, tensor.device).view(tensor.dtype)
        # Memory between the elements of a view belongs to other tensors, which may be written to meanwhile.
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
        """The first or second fill, or a third one for floating-point numbers.

        Each element differs from at least one of the first two. Integers stay valid as indices and offsets: the fills
        are the tensor's smallest and largest value.
        """
        there, dtype = _whole(item), given.dtype
        if dtype is torch.bool:
            return _Fill(there, number)
        if dtype.is_floating_point or dtype.is_complex or dtype.itemsize not in _SAME_WIDTH:
            return _Fill(there, (_NAN, _LARGE, _NEGATIVE)[number])
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
    """The bytes of a placeholder, without an incomplete element at its end."""
    placeholder_tensor = item.placeholder_tensor
    count = item.nbytes // placeholder_tensor.element_size()
    begin = placeholder_tensor.storage_offset() - item.lead // placeholder_tensor.element_size()
    return placeholder_tensor.as_strided((count,), (1,), begin).view(torch.uint8)


def _is_in_memory(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.layout is torch.strided and value.numel() > 0


def listed(names: Sequence[str]) -> str:
    """A few names of kernels, as a phrase."""
    shown = [name if len(name) <= _MOST_CHARACTERS else f"{name[:_MOST_CHARACTERS]}..." for name in names]
    more = [f"{len(shown) - _MOST_NAMED} more"] if len(shown) > _MOST_NAMED else []
    return " or ".join(shown[:_MOST_NAMED] + more)
