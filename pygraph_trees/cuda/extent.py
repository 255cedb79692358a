"""The memory between a strided tensor's first and last element, for any layout."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


def extent(tensor: torch.Tensor) -> int:
    """The number of elements from the first element to the end of the last; the tensor is not empty."""
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """All the memory in one dimension, gaps included: copies and fills work for gaps and overlaps."""
    return tensor.detach().as_strided((extent(tensor),), (1,), tensor.storage_offset())


def contents(tensor: torch.Tensor) -> torch.Tensor:
    """The elements in order, as bytes; a view of the tensor's memory if it is contiguous."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def tensors_with_memory(value: Any) -> Iterator[torch.Tensor]:
    """A tensor; of a wrapper subclass, which has no memory itself, the tensors in it. Nothing for another value."""
    if is_traceable_wrapper_subclass(value):
        for name in value.__tensor_flatten__()[0]:
            yield from tensors_with_memory(getattr(value, name))
    elif isinstance(value, torch.Tensor):
        yield value


def copy_bits(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copies the memory of each source to a target of the same size, on the current stream, by one or two kernels."""
    pairs = [_as_integers(*pair) for pair in zip(targets, sources, strict=True)]
    for dtype in {to.dtype for to, _ in pairs}:
        alike = [pair for pair in pairs if pair[0].dtype == dtype]
        torch._foreach_copy_([to for to, _ in alike], [of for _, of in alike])


def _as_integers(target: torch.Tensor, source: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of 8 bytes if they fit, which is fast for any dtype; a captured copy is a kernel node."""
    to, of = (flat(tensor).view(torch.uint8) for tensor in (target, source))
    if any(found.numel() % 8 or found.storage_offset() % 8 or found.data_ptr() % 8 for found in (to, of)):
        return to, of
    return to.view(torch.int64), of.view(torch.int64)
