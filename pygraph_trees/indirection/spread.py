"""The results of launches that should be equal, and whether those of another launch are equal to them.

:class:`Expected` compares bits, unless equal launches differ by rounding. Results that are floating-point numbers are
then compared within their spread, since the order of atomic additions differs at each launch. All others must still be
equal bit by bit, and so must results that are infinite or not a number.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from pygraph_trees.cuda.extent import contents

if TYPE_CHECKING:
    from collections.abc import Sequence

_NUMBERS = {
    **{dtype: dtype for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64)},
    torch.complex32: torch.float16,
    torch.complex64: torch.float32,
    torch.complex128: torch.float64,
}
_ROOM = 4  # how many spreads a result may be outside of the range that was seen
_MOST_SPREAD = 2.0**-5  # of the largest result; a larger spread is no rounding


def is_number(dtype: torch.dtype) -> bool:
    """Whether results of a type may be compared within a spread."""
    return dtype in _NUMBERS


class Expected:
    """The smallest and largest results of equal launches, by element."""

    def __init__(self, results: Sequence[torch.Tensor]) -> None:
        """``results``: of one launch; they are copied."""
        self._lowest = [_elements(result).clone() for result in results]
        self._highest = self._lowest

    @property
    def is_exact(self) -> bool:
        """Whether all launches gave the same bits."""
        return self._highest is self._lowest

    def widen(self, results: Sequence[torch.Tensor]) -> None:
        """Takes in the results of another equal launch."""
        found = [_elements(result) for result in results]
        if self.is_exact and all(map(_are_same, found, self._lowest)):
            return
        if self.is_exact:
            self._highest = [result.clone() for result in self._lowest]
        for lowest, highest, result in zip(self._lowest, self._highest, found, strict=True):
            if not (_are_same(result, lowest) and _are_same(result, highest)):
                # For bytes, only the difference matters. If one launch gives a NaN, only ``highest`` keeps it.
                torch.fmin(lowest, result, out=lowest)
                torch.maximum(highest, result, out=highest)

    def differs_by_rounding(self) -> bool:
        """Whether launches differ only in finite numbers, and by little."""
        sizes = [_size(result) for result in self._highest if _is_finite(result)]
        most = _MOST_SPREAD * max(sizes, default=0.0)
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
