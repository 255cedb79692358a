"""Memory that test launches of a graph change: other contents where inputs were, which show a stale address.

:class:`Poison` saves memory and the states of random generators, writes other contents to the addresses that moved
inputs have left, and restores everything. :mod:`.hidden_addresses` launches a graph so before its first call, and
``pygraph_verify`` after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

_SAME_WIDTH = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_PLAIN_INTEGERS = {torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}
# Bytes; repeated, they are not a number, a large number and a large negative one in all formats.
_NAN, _LARGE, _NEGATIVE = 0xFF, 0x47, 0xC7


class Poison:
    """Memory and torch's generators that launches may change. Saving elements may raise ``OutOfMemoryError``."""

    def __init__(self, memory: Sequence[torch.Tensor], generators: Sequence[Any] = ()) -> None:
        self._saved = [(tensor, tensor.clone()) for tensor in memory]
        self._states = [(generator, _state(generator)) for generator in generators]
        self._fills: list[tuple[torch.Tensor, int]] = []  # since the last ``put_back``

    @property
    def has_drawn(self) -> bool:
        return any(_state(generator) != state for generator, state in self._states)

    def put_back(self) -> None:
        self._fills = []
        for tensor, content in self._saved:
            tensor.copy_(content)
        for generator, state in self._states:
            if _state(generator) == state:
                continue
            if isinstance(state, bytes):
                generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
            else:
                generator.set_offset(state)

    def fill(self, there: torch.Tensor, content: torch.Tensor, dtype: torch.dtype, number: int = 0) -> None:
        """Fills memory with one value that is not its ``content``; both are given as bytes.

        Each element differs from at least one of the fills 0 and 1; there is a fill 2 for floating-point numbers.
        Integers stay valid as indices and offsets: the fills are the content's smallest and largest value.
        """
        if dtype is torch.bool:
            value = number
        elif dtype.is_floating_point or dtype.is_complex or dtype.itemsize not in _SAME_WIDTH:
            value = (_NAN, _LARGE, _NEGATIVE)[number]
        else:
            integers = dtype if dtype in _PLAIN_INTEGERS else _SAME_WIDTH[dtype.itemsize]
            there, extremes = there.view(integers), _least_and_most(content.view(integers))
            value = extremes[number]
            if extremes[0] == extremes[1]:
                value += -1 if value > 0 else 1
        there.fill_(value)
        self._fills.append((there, value))

    def is_there(self) -> bool:
        """Whether all fills are as they were written."""
        return all(_least_and_most(there) == (value, value) for there, value in self._fills)


def _state(generator: Any) -> int | bytes:
    on_gpu = generator.device.type == "cuda"
    return int(generator.get_offset()) if on_gpu else bytes(generator.get_state().numpy())


def _least_and_most(integers: torch.Tensor) -> tuple[int, int]:
    lowest, highest = torch.aminmax(integers)
    return int(lowest), int(highest)
