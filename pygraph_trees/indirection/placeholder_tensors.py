"""Tensors that stand in for a live input.

:func:`placeholder_tensor` makes one at placeholder addresses for the recording, :func:`copy_at` a copy for one call,
and :func:`seen_as` an output that is a view of the input. Autograd follows none of them. Addresses and sizes are in
bytes, offsets and strides in elements.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from pygraph_trees.cuda.extent import extent, flat

WHOLE_STORAGE = 64 << 20  # bytes up to which a placeholder stands for the whole storage of a view


class Span(NamedTuple):
    """The memory that a placeholder stands for."""

    nbytes: int
    lead: int  # from its start to the tensor's first element
    whole_storage: bool


def span_of(tensor: torch.Tensor) -> Span:
    """The whole storage, since code may read outside of the view, unless it is much larger than the view."""
    storage = tensor.untyped_storage().nbytes()
    if storage > WHOLE_STORAGE:
        reached = extent(tensor) * tensor.element_size()
        if storage > 4 * reached:
            return Span(reached, 0, False)
    return Span(storage, tensor.storage_offset() * tensor.element_size(), True)


def tensor_in(storage: torch.UntypedStorage, size: Any, stride: Any, dtype: torch.dtype, offset: int) -> torch.Tensor:
    """A tensor in a storage, with the given size, strides and offset."""
    metadata = {
        "nbytes": storage.nbytes(),
        "data_ptr": storage.data_ptr(),
        "size": size if isinstance(size, torch.Size) else torch.Size(size),
        "stride": stride,
        "dtype": dtype,
        "device": storage.device,
        "storage_offset": offset,
    }
    return torch._C._construct_CUDA_Tensor_From_Storage_And_Metadata(metadata, storage)


def memory_at(address: int, nbytes: int, device: torch.device) -> torch.UntypedStorage:
    """A storage at an address, which it does not own."""
    return torch._C._construct_storage_from_data_pointer(address, device, nbytes)


def bytes_at(address: int, nbytes: int, device: torch.device) -> torch.Tensor:
    """The bytes at an address, which the tensor does not own; autograd does not see writes to it."""
    return torch.empty(0, dtype=torch.uint8, device=device).set_(memory_at(address, nbytes, device), 0, (nbytes,), (1,))


def placeholder_tensor(start: int, span: Span, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor like ``tensor`` in memory at an address, which it does not own."""
    storage = memory_at(start, span.nbytes, device)
    offset = tensor.storage_offset() if span.whole_storage else 0
    return tensor_in(storage, tensor.shape, tensor.stride(), tensor.dtype, offset)


def copy_at(tensor: torch.Tensor, residue: int) -> torch.Tensor:
    """A copy with the same strides, at an address that is ``residue`` modulo 512."""
    nbytes = extent(tensor) * tensor.element_size()
    buffer = torch.empty(nbytes + 1024, dtype=torch.uint8, device=tensor.device)
    begin = (residue - buffer.data_ptr()) % 512
    copy = buffer[begin : begin + nbytes].view(tensor.dtype)
    copy.copy_(flat(tensor))
    return copy.as_strided(tensor.shape, tensor.stride(), copy.storage_offset())


def seen_as(base: torch.Tensor, size: Any, stride: Any, offset: int, dtype: torch.dtype) -> torch.Tensor:
    """A view of ``base``; the offset is in elements of ``dtype``, from where ``base`` begins."""
    if dtype == base.dtype:
        return torch._C._dynamo.guards._reinterpret_tensor(base, size, stride, offset)
    begin = base.storage_offset() * base.element_size() // dtype.itemsize
    return tensor_in(base.untyped_storage(), size, stride, dtype, begin + offset)


def may_be_seen(base: torch.Tensor, view: tuple[Any, ...] | None) -> bool:
    """Whether :func:`seen_as` can give a view of a tensor's memory the right elements; None: the tensor itself."""
    if base._is_zerotensor():
        return False
    dtype = base.dtype if view is None else view[-1]
    begin = base.storage_offset() * base.element_size()
    return dtype == base.dtype or not (base.is_conj() or base.is_neg() or begin % dtype.itemsize)
