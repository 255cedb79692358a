"""The memory between a strided tensor's first and last element, for any layout.

Each function takes a tensor with strides and returns its size or a view of its memory. With gaps or overlapping
elements, the flat view covers all memory in between, so copies and fills are exact.
"""

from __future__ import annotations

import torch


def extent(tensor: torch.Tensor) -> int:
    """The number of elements from the first element to the end of the last; the tensor is not empty."""
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """All the memory in one dimension, gaps included: copies and fills work for gaps and overlaps."""
    return tensor.detach().as_strided((extent(tensor),), (1,), tensor.storage_offset())


def contents(tensor: torch.Tensor) -> torch.Tensor:
    """The elements in order, as bytes; a view of the tensor's memory if it is contiguous."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
