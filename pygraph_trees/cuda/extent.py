"""The memory between a strided tensor's first and last element, whatever its layout."""

from __future__ import annotations

import torch


def extent(tensor: torch.Tensor) -> int:
    """From the first element to behind the last one, in elements; the tensor has some."""
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """All of it in one dimension, gaps included: how layouts with gaps and overlaps are copied and filled."""
    return tensor.detach().as_strided((extent(tensor),), (1,), tensor.storage_offset())


def contents(tensor: torch.Tensor) -> torch.Tensor:
    """The elements one after another, as bytes; the tensor's own memory where they lie there so."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
