"""One live input of a recording: an :class:`Operand` of the call that is recorded, then an :class:`Item`.

An item has the tensor that stands for the input while the function is recorded: at a placeholder address, in a copy in
ordinary memory (a mutated input without a placeholder), or in a staging buffer (an input on the CPU). Autograd follows
none of these tensors. Addresses and sizes are in bytes, offsets and strides in elements.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from pygraph_trees.cuda.extent import extent, flat

from .retired import LastLaunches

Given = Mapping[int, torch.Tensor] | Sequence[Any]  # a call's tensors, by index
WHOLE_STORAGE = 64 << 20  # bytes up to which a placeholder stands for the whole storage of a view


@dataclass(slots=True)  # a frozen one takes four times as long to make
class Item:
    """A live input with its placeholder tensor."""

    index: int
    lead: int  # bytes from the start of the placeholder to the first element
    nbytes: int  # of the placeholder
    placeholder_tensor: torch.Tensor
    recorded: int  # address of the placeholder tensor's first element
    mutated: bool
    managed: bool
    overwritten: bool = False  # a launch leaves something else in its memory, maybe an output


@dataclass(frozen=True, slots=True)
class Operand:
    """A live input that is recorded at a placeholder address, or own memory of an output."""

    index: int  # among the function's inputs
    tensor: torch.Tensor  # of the call that is recorded
    mutated: bool
    overwritten: bool  # not ``mutated``, but a launch may leave something else in its memory
    managed: bool  # an output of an earlier recording whose address was found to change
    tabled: bool  # it gets a slot in a table
    own: bool | None  # for own memory: whether only our own copies write to it, so that no kernel hides it

    def at_placeholder(self, span: Span, start: int, device: torch.device) -> Item:
        """``start``: the address of the placeholder."""
        made = placeholder_tensor(start, span, self.tensor, device)
        recorded = start + span.lead
        return Item(*(self.index, span.lead, span.nbytes, made, recorded, self.mutated, self.managed, self.overwritten))


def copied_in_memory(index: int, tensor: torch.Tensor) -> Item:
    """A mutated input that is copied; its copy includes gaps between rows: views of the input may be there."""
    copy = copy_at(tensor, tensor.data_ptr() % 512)
    return Item(index, 0, extent(copy) * copy.element_size(), copy, copy.data_ptr(), mutated=True, managed=False)


class CopiedInputs(dict[int, Item]):
    """The inputs that a recording copies at each call, to memory that ``launches`` use, and back if mutated."""

    def __init__(self, items: Iterable[Item] = ()) -> None:
        super().__init__((item.index, item) for item in items)
        self.mutated = tuple(item for item in self.values() if item.mutated)
        self.launches = LastLaunches()

    def copy_in(self, given: Given) -> None:
        if self:
            self.launches.begin()
        for item in self.values():
            flat(item.placeholder_tensor).copy_(flat(given[item.index]))

    def copy_back(self, given: Given, device: int) -> None:
        """After the launch on the current stream."""
        for item in self.mutated:
            write(given[item.index], item.placeholder_tensor)
        if self:
            self.launches.end(device)


def write(given: torch.Tensor, copy: torch.Tensor) -> None:
    """Writes a copy back to an input. Autograd does not see it, as it does not see what kernels write."""
    given.data.copy_(copy)


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


def memory_of(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes from a tensor's first to its last element, without a reference to it."""
    return bytes_at(tensor.data_ptr(), extent(tensor) * tensor.element_size(), tensor.device)


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
