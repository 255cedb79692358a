"""The inputs of a case in memory: laid out, placed and filled as the case says.

Each input is in a block of its own with :data:`GUARD` elements before and after it, which reveal reads and writes
beside the tensor. Values depend only on the case, the input's name and the number of the call: two :class:`Memory`
objects of one case hold equal values at different addresses.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from .case import Case, Input, seed_of

GUARD = 64  # elements, at least 128 bytes for any dtype but bool


def strides_of(item: Input) -> tuple[int, ...]:
    """The strides of an input, in elements."""
    dense = _contiguous(item.shape)
    rank = len(item.shape)
    if item.layout == "transposed" and rank >= 2:
        swapped = _contiguous((*item.shape[:-2], item.shape[-1], item.shape[-2]))
        return (*swapped[:-2], swapped[-1], swapped[-2])
    if item.layout == "sliced" and rank >= 2:
        return (*_contiguous((*item.shape[:-1], item.shape[-1] + 3))[:-1], 1)
    if item.layout == "strided":
        return tuple(2 * s for s in dense)
    if item.layout == "expanded" and rank >= 1:
        return (0, *dense[1:])
    if item.layout == "overlapping" and rank >= 2:
        row = max(1, item.shape[-1] // 2)
        return (*(row * s for s in _contiguous(item.shape[:-1])), 1)
    if item.layout == "channels_last" and rank == 4:
        return torch.empty(item.shape, device="meta", memory_format=torch.channels_last).stride()
    return dense


def extent_of(item: Input) -> int:
    """The number of elements from the first to the end of the last; 0 if the input is empty."""
    if 0 in item.shape:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(item.shape, strides_of(item), strict=True))


def offset_of(item: Input) -> int:
    """The offset of an input in its block, in elements."""
    return GUARD + item.shift + (item.layout == "misaligned")


class Memory:
    """The inputs of one way of running a case."""

    def __init__(self, case: Case, device: torch.device) -> None:
        self.case = case
        self.device = device
        self.blocks: dict[str, torch.Tensor] = {}  # by name of the input that owns it, for the latest call
        self._owners = {i.name: i for i in case.inputs if i.shares is None}
        self._tensors: dict[str, torch.Tensor] = {}
        self._kept: list[torch.Tensor] = []
        self._pairs: dict[str, list[torch.Tensor]] = {}

    def prepare(self, call: int) -> Mapping[str, torch.Tensor]:
        """The inputs for a call, by name."""
        with torch.no_grad():
            for item in self._owners.values():
                self._place(item, call)
                if item.place != "kept" or call == 0:
                    self._fill(item, call)
            for item in self.case.inputs:
                if item.name not in self._tensors:
                    self._tensors[item.name] = self._view(item)
        return self._tensors

    def place_of(self, tensor: torch.Tensor) -> str | None:
        """The block that holds a tensor, and the offset in it; None for other memory."""
        for name, block in self.blocks.items() if tensor.numel() else ():
            if block.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr():
                return f"{name} + {tensor.storage_offset()}"
        return None

    def _place(self, item: Input, call: int) -> None:
        """Prepares the block of an input."""
        name = item.name
        if item.place in ("same", "kept"):
            if name not in self.blocks:
                self.blocks[name] = self._allocate(item)
            return
        if item.place == "alternate":
            if name not in self._pairs:
                self._pairs[name] = [self._allocate(item) for _ in range(2)]
            self.blocks[name] = self._pairs[name][call % 2]
            self._forget_views(item)
            return
        fresh = self._allocate(item)
        self._forget_views(item)
        old = self.blocks.pop(name, None)
        self.blocks[name] = fresh
        if old is not None and item.place == "fresh":
            self._kept.append(old)
        elif old is not None:
            size = old.numel()
            del old
            # Likely reuses the freed memory, unless a tensor of the program holds it, and overwrites it.
            self._kept.append(torch.zeros(size, dtype=item.torch_dtype, device=self.device))

    def _forget_views(self, item: Input) -> None:
        for other in self.case.inputs:
            if item.name in (other.name, other.shares):
                self._tensors.pop(other.name, None)

    def _allocate(self, item: Input) -> torch.Tensor:
        ends = [offset_of(i) + extent_of(i) for i in self.case.inputs if item.name in (i.name, i.shares)]
        guard = 7 if item.torch_dtype.is_floating_point else 0  # no program computes 7, and 0 is a valid index
        return torch.full((max(ends) + GUARD,), guard, dtype=item.torch_dtype, device=self.device)

    def _fill(self, item: Input, call: int) -> None:
        begin, count = offset_of(item), extent_of(item)
        generator = torch.Generator().manual_seed(seed_of(item.name, item.values, call))
        self.blocks[item.name][begin : begin + count] = _values(item.values, count, generator).to(item.torch_dtype)

    def _view(self, item: Input) -> torch.Tensor:
        block = self.blocks[item.shares or item.name]
        view = block.as_strided(item.shape, strides_of(item), offset_of(item))
        if self.case.backward and item.torch_dtype.is_floating_point:
            view = view.detach().requires_grad_()
        return view


def _values(kind: str, count: int, generator: torch.Generator) -> torch.Tensor:
    if kind == "unit":
        return torch.rand(count, generator=generator) * 2 - 1
    if kind == "mask":
        return torch.rand(count, generator=generator) < 0.5
    if kind == "order":
        return torch.randperm(count, generator=generator)
    word, _, limit = kind.partition(" ")
    if word != "below" or not limit.isdigit():
        raise ValueError(f"values are 'unit', 'mask', 'order' or 'below N'; got {kind!r}")
    return torch.randint(0, int(limit), (count,), generator=generator)


def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    return torch.empty(shape, device="meta").stride()
