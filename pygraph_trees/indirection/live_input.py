"""One live input of a recording: an :class:`Operand` of the call that is recorded, then an :class:`Item`.

An item has the tensor that stands for the input while the function is recorded. That tensor is at a placeholder
address, in a copy in ordinary memory (a mutated input without a placeholder), or in a staging buffer (an input on the
CPU).
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import torch

from pygraph_trees.cuda.extent import extent

from .placeholder_tensors import Span, copy_at, placeholder_tensor


class Place(enum.Enum):
    """The location of the tensor that stands for an input."""

    PLACEHOLDER = enum.auto()
    MEMORY = enum.auto()
    STAGING_BUFFER = enum.auto()


@dataclass(frozen=True, slots=True)
class Operand:
    """A live input, or own memory of an output."""

    index: int  # among the function's inputs
    tensor: torch.Tensor  # of the call that is recorded
    place: Place
    mutated: bool = False
    managed: bool = False  # an output of an earlier recording whose address was found to change
    tabled: bool = False  # it gets a slot in a table
    own: bool | None = None  # for own memory: whether only our own copies write to it, so that no kernel hides it
    why_copied: str = ""  # for one in ordinary memory


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


def at_placeholder(operand: Operand, span: Span, start: int, device: torch.device) -> Item:
    """``start``: the address of the placeholder."""
    made = placeholder_tensor(start, span, operand.tensor, device)
    return Item(operand.index, span.lead, span.nbytes, made, start + span.lead, operand.mutated, operand.managed)


def in_memory(operand: Operand) -> Item:
    """A mutated input that is copied; its copy includes gaps between rows, since views of the input may be there."""
    copy = copy_at(operand.tensor, operand.tensor.data_ptr() % 512)
    nbytes = extent(copy) * copy.element_size()
    return Item(operand.index, 0, nbytes, copy, copy.data_ptr(), mutated=True, managed=False)


def in_staging_buffer(index: int, memory: torch.Tensor) -> Item:
    return Item(index, 0, memory.nbytes, memory, memory.data_ptr(), mutated=False, managed=False)
