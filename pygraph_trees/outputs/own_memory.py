"""Own memory of a function's outputs, outside of the graph pool: replays write it again while it is dead.

A function with own memory has an additional input for each :class:`~.allocations.Block`; its graph writes outputs
there. C++ owns the blocks (``native/own_memory.cpp``), and allocates others in place of those that the program still
uses. Without the native parts, no function has own memory.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from pygraph_trees.cuda.extent import extent
from pygraph_trees.native import binding
from pygraph_trees.report.naming import BACKWARD

from .allocations import Allocations, Block, Storage

if TYPE_CHECKING:
    from pygraph_trees.report.log import FunctionLog

MOST_CHANGES = 3  # of the outputs of one function that have own memory, not counting those before its first recording


class _Call(threading.local):
    """What a thread's call of a function does with its outputs."""

    blocks: tuple[Block, ...] = ()  # of the own memory that it is given
    watch: Allocations | None = None  # watches the next run of the compiled code


@dataclass(slots=True)
class OwnOutputs:
    """The outputs of one function that have own memory from its next call on, in each thread."""

    takes: int | None = None  # how many inputs Inductor gives the function, once it was added to a manager
    blocks: tuple[Block, ...] = ()
    copied: set[tuple[int, ...]] = field(default_factory=set)  # outputs of generated code that the graph copies
    refused: set[tuple[int, ...]] = field(default_factory=set)  # outputs that stay in the graph pool
    changes: int = 0
    call: _Call = field(default_factory=_Call)

    def allocations(self, inputs: list[Any]) -> Allocations | None:
        """The allocations of a run with these inputs, if they are watched or replaced; removes own memory from these.

        Only a captured run writes to own memory; un-graphed code allocates its outputs itself.
        """
        if self.takes is not None and len(inputs) > self.takes:
            given = inputs[self.takes :]
            del inputs[self.takes :]
            blocks = self.call.blocks
            # A check of a recording may have the memory of earlier blocks.
            is_written = len(given) == len(blocks) and torch.cuda.is_current_stream_capturing()
            return Allocations(dict(zip(blocks, given, strict=True))) if is_written else None
        watch, self.call.watch = self.call.watch, None
        return watch

    def blocks_of(self, storages: Iterable[Storage], wanted: Iterable[int]) -> tuple[Block, ...]:
        """The present blocks and those of the ``wanted`` outputs, which were found in ``storages``."""
        numbers = set(wanted).union(*(block.outputs for block in self.blocks))
        found = (storage.block for storage in storages)
        return tuple(
            Block(block.outputs, None) if block.outputs in self.copied else block
            for block in found
            if block.outputs not in self.refused and not numbers.isdisjoint(block.outputs)
        )


class OwnMemory:
    """The blocks of one function, for one set of its integers."""

    def __init__(
        self, blocks: Sequence[Block], storages: Iterable[Storage], device: torch.device, log: FunctionLog, takes: int
    ) -> None:
        """``storages``: where a warm-up found the outputs of each block; ``takes``: how many inputs precede the blocks.

        Whether blocks are kept from call to call depends on how long outputs have lived before, and later, on how long
        they live.
        """
        is_backward, holds = log.mode == BACKWARD, bool(log.moved)
        self.blocks, self.takes = tuple(blocks), takes
        # By index of each block among the inputs, whether only a copy at the end of the graph writes to it.
        self.inputs = {index: block.allocation is None for index, block in enumerate(blocks, takes)}
        self.outputs = {number: block for block in blocks for number in block.outputs}
        by_outputs = {storage.block.outputs: storage for storage in storages}
        self.native = binding.extension.OwnMemory(
            like=torch.empty(0, device=device),
            blocks=[_described(by_outputs[block.outputs], block, is_backward, holds) for block in blocks],
            allocated=log.blocks_allocated,
            given_away=log.blocks_given_away,
        )

    def __len__(self) -> int:
        return len(self.blocks)

    @staticmethod
    def fits(blocks: Iterable[Block], storages: Iterable[Storage]) -> bool:
        """Whether a warm-up found all blocks, each at its allocation."""
        found = {storage.block.outputs: storage.allocation for storage in storages}
        return all(block.outputs in found and block.allocation in (None, found[block.outputs]) for block in blocks)

    def is_given(self, inputs: Sequence[Any]) -> bool:
        """Whether these inputs of a call end with this memory."""
        return len(inputs) == self.takes + len(self) and inputs[self.takes] is self.native.item(0)

    def output(self, index: int, view: tuple[Any, ...] | None) -> torch.Tensor:
        """A new tensor for an output of this call; ``index`` and ``view`` are as in ``LiveInputs.outputs``."""
        return self.native.alias(index - self.takes, view)


def _described(storage: Storage, block: Block, is_backward: bool, holds: bool) -> tuple[Any, ...]:
    """A block as the C++ constructor takes it. A block that is lent as a gradient has the gradient's layout."""
    view = storage.views[0]
    is_plain = view.offset == 0 and (block.allocation is None or view.dtype == storage.dtype)
    reached = extent(torch.empty_strided(view.size, view.stride, device="meta")) * view.dtype.itemsize
    if is_backward and len(storage.views) == 1 and is_plain and 4 * reached >= storage.nbytes:
        return storage.nbytes, view.size, view.stride, view.dtype, True, holds
    if block.allocation is None:
        return storage.nbytes, (storage.nbytes,), (1,), torch.uint8, False, holds
    return storage.nbytes, storage.size, storage.stride, storage.dtype, False, holds
