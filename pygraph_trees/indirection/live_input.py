"""One live input of a recording, with the tensor that stands for it while the function is recorded.

The tensor is at a placeholder address, in a copy in ordinary memory (a mutated input without a placeholder), or in a
staging buffer (an input on the CPU).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pygraph_trees.cuda.extent import extent

from .placeholder_tensors import Span, copy_at, placeholder_tensor


@dataclass(slots=True)  # a frozen one takes four times as long to make
class Item:
    """A live input with its placeholder tensor."""

    index: int  # among the function's inputs
    lead: int  # bytes from the start of the placeholder to the first element
    nbytes: int  # of the placeholder
    placeholder_tensor: torch.Tensor
    recorded: int  # address of the placeholder tensor's first element
    mutated: bool
    managed: bool  # an output of an earlier recording whose address was found to change


def at_placeholder(
    index: int, tensor: torch.Tensor, span: Span, start: int, device: torch.device, *, mutated: bool, managed: bool
) -> Item:
    """``start``: the address of the placeholder."""
    made = placeholder_tensor(start, span, tensor, device)
    return Item(index, span.lead, span.nbytes, made, start + span.lead, mutated, managed)


def in_memory(index: int, tensor: torch.Tensor) -> Item:
    """A mutated input that is copied; its copy includes gaps between rows, since views of the input may be there."""
    copy = copy_at(tensor, tensor.data_ptr() % 512)
    nbytes = extent(copy) * copy.element_size()
    return Item(index, 0, nbytes, copy, copy.data_ptr(), mutated=True, managed=False)


def in_staging_buffer(index: int, memory: torch.Tensor) -> Item:
    return Item(index, 0, memory.nbytes, memory, memory.data_ptr(), mutated=False, managed=False)
