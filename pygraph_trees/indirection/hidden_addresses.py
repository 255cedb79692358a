"""Checks, when a graph is recorded, that no unknown kernel holds an input's address in a form that a scan misses.

A :class:`Rehearsal` launches the graph with all inputs at their placeholder addresses, then with inputs at their own
addresses and other contents at the placeholders. An input for which the results differ (:class:`Expected`), or the
contents change, cannot be given by address. Declared changes of memory and generators are undone; undeclared ones are
not noticed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pygraph_trees.cuda.extent import contents, flat
from pygraph_trees.reasons import Reason, Why

from .live_input import Item, bytes_at, memory_of
from .poison import Poison

_MOST_ALONE = 8  # inputs that are tried one by one, each for an instantiation and two launches
_MOST_NAMED = 3  # kernels in a reason
_MOST_CHARACTERS = 60  # of a kernel's name, which is mangled

_EQUAL_LAUNCHES = 4  # compared before an input is copied; as many again if a result is outside of their spread

_NUMBERS = {
    **{dtype: dtype for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64)},
    torch.complex32: torch.float16,
    torch.complex64: torch.float32,
    torch.complex128: torch.float64,
}
_ROOM = 4  # how many spreads a result may be outside of the range that was seen
_MOST_SPREAD = 2.0**-5  # of the largest result; a larger spread is no rounding


@dataclass(frozen=True, slots=True)
class Surroundings:
    """Values that a launch reads and writes besides the inputs that have placeholder tensors."""

    # None of these tensors is empty or in the memory of a placeholder tensor.
    outputs: Sequence[torch.Tensor] = ()
    kept: Sequence[torch.Tensor] = ()  # inputs that a launch may overwrite: in the graph pool, or mutated ones
    written: Sequence[torch.Tensor] = ()  # those of ``kept`` that the function mutates
    generators: Sequence[Any] = ()  # generators of the GPU that a launch may draw from


class Rehearsal:
    """Launches of one graph before the program's first one; :meth:`put_back` restores the memory that they change."""

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
        written = [given(item.index) for item in items[:count] if item.mutated or item.overwritten]
        self._poison = Poison([_elements_of(t) for t in (*surroundings.kept, *written)], surroundings.generators)
        self.put_back = self._poison.put_back  # restores everything that the launches have changed

    def failing(self, positions: Sequence[int], unknown: Sequence[str]) -> dict[int, Why]:
        """By position, why an input that should be given by address cannot be; ``unknown``: names of kernels."""
        kernels = listed(unknown)
        differ = Reason.HIDDEN_BY_CHANCE(kernels=kernels)
        fails: dict[int, Why] = {}
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
            wrong = positions
            if 1 < len(positions) <= _MOST_ALONE:
                wrong = [position for position in positions if not self._is_same([position], expected)]
                others = [position for position in positions if position not in wrong]
                if not wrong or (others and not self._is_same(others, expected)):
                    wrong = positions
        except torch.OutOfMemoryError:
            return dict.fromkeys([*fails, *positions], Reason.HIDDEN_UNCHECKED(kernels=kernels))
        return fails | dict.fromkeys(wrong, Reason.HIDDEN_SURELY(kernels=kernels))

    def _shows(self, position: int) -> bool:
        """Whether results that differ by rounding would show that a launch still uses an input's placeholder.

        A NaN stays one in sums and products; if a maximum, comparison or selection drops it, a large number of one sign
        or the other shows. Integers have no NaN, and a sum may be too small to be missed in an input that is added to.
        """
        item = self._items[position]
        is_changed = (item.mutated or item.overwritten) and position not in self._own
        return item.placeholder_tensor.dtype in _NUMBERS and not is_changed

    def _prepare(self) -> None:
        self.put_back()
        for position, item in enumerate(self._items):
            given = self._given(item.index)
            if position < self._count:
                there, content = _whole(item, given)
                there.copy_(content)
            else:
                flat(item.placeholder_tensor).copy_(flat(given))

    def _results(self, moved: Collection[int]) -> list[torch.Tensor]:
        """The results of the latest launch; the next launch overwrites them."""
        written = [
            self._given(item.index) if position in moved else item.placeholder_tensor
            for position, item in enumerate(self._items)
            if item.mutated or item.overwritten
        ]
        return [*self._surroundings.outputs, *self._surroundings.written, *written]

    def _launch_as_recorded(self) -> None:
        self._prepare()
        self._launch(())

    def _is_same(self, moved: Sequence[int], expected: Expected) -> bool:
        """Whether launches with inputs at their own addresses give these results, whatever the placeholders hold."""
        for number in range(2 if expected.is_exact else 3):
            self._prepare()
            for item in (self._items[position] for position in moved):
                given = self._given(item.index)
                self._poison.fill(*_whole(item, given), given.dtype, number)
            self._launch(moved)
            if not self._poison.is_there() or not self._is_expected(self._results(moved), expected):
                return False
        return True

    def _is_expected(self, results: Sequence[torch.Tensor], expected: Expected) -> bool:
        """Whether these are results of an equal launch. Outside of the spread, more equal launches are compared first.

        Another program that starts to use the GPU changes the order of atomic additions.
        """
        is_included = expected.includes(results)
        if expected.is_exact or is_included:
            return is_included
        results, wider = [result.clone() for result in results], expected.copied()
        for _ in range(_EQUAL_LAUNCHES):
            self._launch_as_recorded()
            wider.widen(self._results(()))
        return wider.differs_by_rounding() and wider.includes(results)


def _elements_of(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's elements without autograd. The memory between them belongs to other tensors."""
    memory = memory_of(tensor).view(tensor.dtype)
    overlaps = torch._debug_has_internal_overlap(tensor) == 1
    return memory if overlaps else memory.as_strided(tensor.shape, tensor.stride())


def _whole(item: Item, given: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The bytes of a placeholder and of the input, without an incomplete element at their end."""
    placeholder_tensor, size = item.placeholder_tensor, item.placeholder_tensor.element_size()
    count = item.nbytes // size
    there = placeholder_tensor.as_strided((count,), (1,), placeholder_tensor.storage_offset() - item.lead // size)
    return there.view(torch.uint8), bytes_at(given.data_ptr() - item.lead, count * size, given.device)


def listed(names: Sequence[str]) -> str:
    shown = [name if len(name) <= _MOST_CHARACTERS else f"{name[:_MOST_CHARACTERS]}..." for name in names]
    more = [f"{len(shown) - _MOST_NAMED} more"] if len(shown) > _MOST_NAMED else []
    return " or ".join(shown[:_MOST_NAMED] + more)


class Expected:
    """The smallest and largest results of equal launches, by element.

    Bits are compared. If equal launches differ by rounding, finite numbers are compared within their spread.
    """

    def __init__(self, results: Sequence[torch.Tensor]) -> None:
        """``results``: of one launch; they are copied."""
        self._lowest = [_elements(result).clone() for result in results]
        self._highest = self._lowest

    @property
    def is_exact(self) -> bool:
        return self._highest is self._lowest

    def copied(self) -> Expected:
        """A copy that can be widened for one comparison; it must not be exact."""
        made = Expected(self._lowest)
        made._highest = [result.clone() for result in self._highest]
        return made

    def widen(self, results: Sequence[torch.Tensor]) -> None:
        """Takes in the results of another equal launch."""
        if self.is_exact and self.includes(results):
            return
        found = [_elements(result) for result in results]
        if self.is_exact:
            self._highest = [result.clone() for result in self._lowest]
        for lowest, highest, result in zip(self._lowest, self._highest, found, strict=True):
            if not (_are_same(result, lowest) and _are_same(result, highest)):
                # For bytes, only the difference matters. If one launch gives a NaN, only ``highest`` keeps it.
                torch.fmin(lowest, result, out=lowest)
                torch.maximum(highest, result, out=highest)

    def differs_by_rounding(self) -> bool:
        """Whether launches differ only in finite numbers, and by little."""
        most = _MOST_SPREAD * max((_size(result) for result in self._highest if _is_finite(result)), default=0.0)
        return all(
            _are_same(lowest, highest)
            or (_is_finite(lowest) and _is_finite(highest) and _spread(lowest, highest) <= most)
            for lowest, highest in zip(self._lowest, self._highest, strict=True)
        )

    def includes(self, results: Sequence[torch.Tensor]) -> bool:
        """Whether the results of another launch are equal to those seen, within the spread of these."""
        found = [_elements(result) for result in results]
        if self.is_exact:
            return all(map(_are_same, found, self._lowest))
        return all(map(_is_within, found, self._lowest, self._highest))


def _elements(tensor: torch.Tensor) -> torch.Tensor:
    """The elements in order, as real numbers or as bytes; a view of the tensor's memory if it is contiguous."""
    dtype = _NUMBERS.get(tensor.dtype)
    return contents(tensor) if dtype is None else contents(tensor).view(dtype)


def _are_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def _is_finite(result: torch.Tensor) -> bool:
    return result.is_floating_point() and bool(result.isfinite().all())


def _size(result: torch.Tensor) -> float:
    if not result.numel():
        return 0.0
    lowest, highest = torch.aminmax(result)
    return max(-float(lowest), float(highest))


def _wide(result: torch.Tensor) -> torch.Tensor:
    return result.float() if result.element_size() < 4 else result


def _spread(lowest: torch.Tensor, highest: torch.Tensor) -> float:
    return float((_wide(highest) - _wide(lowest)).max())


def _is_within(found: torch.Tensor, lowest: torch.Tensor, highest: torch.Tensor) -> bool:
    """Whether a result is between two others, with some room, or equal to both."""
    if _are_same(lowest, highest) and _are_same(found, lowest):
        return True
    if not (_is_finite(lowest) and _is_finite(highest)):
        return False
    # Equal launches may agree on an element by chance, so all elements have the same room.
    rounding = torch.finfo(found.dtype).eps * max(_size(lowest), _size(highest))
    room = _ROOM * max(_spread(lowest, highest), rounding)
    found, lowest, highest = _wide(found), _wide(lowest), _wide(highest)
    return bool(((found >= lowest - room) & (found <= highest + room)).all())  # false for what is not a number
