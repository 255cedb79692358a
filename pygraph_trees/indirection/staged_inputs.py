"""The CPU inputs of one recording, which nodes of its graph copy from staging buffers or hold by value.

:class:`StagedInputs` knows when the program reads each of them, checks that the captured graph copies all of them, and
puts the inputs of each call there. An input's *number* is its position among the staged inputs. :class:`NotStaged` is
raised if an input cannot be staged.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from pygraph_trees.cuda.host_reads import HostRead
from pygraph_trees.errors import PygraphError
from pygraph_trees.reasons import Reason

from .live_input import Item
from .relocations import BY_VALUE, Scan
from .staging import StagedValues, staging_for

if TYPE_CHECKING:
    from pygraph_trees.cuda.driver import Driver

_MOST_NBYTES = 16 << 20  # torch copies larger CPU inputs


class NotStaged(PygraphError, RuntimeError):
    template = Reason.ON_CPU_UNREAD.value


def may_be_staged(tensor: torch.Tensor) -> bool:
    """Whether an input is on the CPU and a copy of it to the GPU is one row of bytes."""
    return tensor.is_cpu and tensor.layout is torch.strided and 0 < tensor.nbytes <= _MOST_NBYTES


class StagedInputs:
    """The staged inputs of one recording."""

    def __init__(self, driver: Driver, tensors: Mapping[int, torch.Tensor], device: int) -> None:
        """``tensors``: of the call that is recorded, by index of the input; at least one."""
        self.indices = list(tensors)
        self._device = device
        self.staging = staging_for(driver, device, list(tensors.values()))
        self._values = values = self.staging if isinstance(self.staging, StagedValues) else None
        self.has_buffers = values is None  # whether launches read the inputs in buffers, not in nodes
        # The captured nodes that hold inputs by value, and the address from which each copies its bytes.
        self.nodes: Mapping[int, int] = {} if values is None else values.nodes
        # Captures a node that holds the second tensor and writes it to the first; None if a copy node must.
        self.capture = None if values is None else values.capture
        self.items = tuple(
            Item(index, 0, memory.nbytes, memory, memory.data_ptr(), mutated=False, managed=False)
            for index, memory in zip(self.indices, self.staging.placeholder_tensors, strict=True)
        )
        self._reads: dict[int, HostRead] = {}  # by number
        self.put_indices: tuple[int, ...] = ()  # of the inputs that the instantiated graph copies

    @property
    def values(self) -> list[tuple[int, torch.Tensor, bool]]:
        """By input that nodes hold: its index, where it is put, and whether it must be waited for if it is pinned."""
        places = [] if self._values is None else self._values.places
        return [(index, *place) for index, place in zip(self.put_indices, places, strict=False)]

    def note_reads(self, reads: Iterable[tuple[int, HostRead]]) -> None:
        """Notes when addresses in staging buffers are read; an input is read in order if its parts differ."""
        found: dict[int, HostRead] = {}
        for address, read in reads:
            for number, item in enumerate(self.items):
                if item.recorded <= address < item.recorded + item.nbytes:
                    found[number] = read if found.get(number, read) is read else HostRead.IN_ORDER
        self._reads = found

    def check(self, found: Scan, first: int, returned: Collection[int], copied: Iterable[int]) -> None:
        """Raises :class:`NotStaged` if the graph does not read an input, or if a captured copy cannot be given others.

        An input that the graph does not read may have been read during the recording, and its value be fixed in the
        graph. One that is returned without being read is needed by a later partition. Every copy must be found to be
        given other addresses or values; several may read the same memory.

        Args:
            first: the number of the first staging buffer in the scan's relocations.
            returned: indices of inputs that the function returns.
            copied: the addresses at which the captured copies begin.
        """
        recorded = self.staging.recorded
        staged = [relocation for relocation in found.relocations if relocation.input >= first]
        if not self.has_buffers and any(relocation.offset != BY_VALUE for relocation in staged):
            raise NotStaged(index=self.indices[0])  # a launch would read the block
        held = Counter(recorded[relocation.input - first][0] + relocation.addend for relocation in staged)
        for address in Counter(copied) - held:
            on_it = (item.index for item in self.items if 0 <= address - item.recorded < item.nbytes)
            raise NotStaged(index=next(on_it, self.indices[0]))
        read = self._read_by(found, first)
        for number, index in enumerate(self.indices):
            if number not in read and index not in returned:
                raise NotStaged(index=index)

    def _read_by(self, found: Scan, first: int) -> list[int]:
        """The numbers of the inputs that were staged during the capture and that a node of the graph copies."""
        copied = {relocation.input - first for relocation in found.relocations}
        return [n for n in range(len(self.indices)) if n in self._reads and self.staging.source_of(n) in copied]

    def take(self, found: Scan | None, first: int) -> dict[int, int]:
        """Prepares replays; returns the recorded addresses that they replace, by number in the scan's relocations.

        Args:
            found: None if the graph could not be read; it then reads all inputs, at their recorded addresses.
        """
        if found is None and not self.has_buffers:
            raise NotStaged(index=self.indices[0])
        numbers = list(range(len(self.indices))) if found is None else self._read_by(found, first)
        sources = [] if found is None else sorted({self.staging.source_of(number) for number in numbers})
        self.put_indices = tuple(self.indices[number] for number in numbers)
        self.staging.take(numbers, self._reads, sources)
        self.staging.is_fixed = found is None
        return {first + source: self.staging.recorded[source][0] for source in sources}

    def put(self, inputs: Any) -> tuple[Sequence[int], Sequence[int]]:
        """Stages a call's inputs; returns the buffers' addresses unless they are fixed, and those to set again."""
        buffers = self.staging.put([inputs[index] for index in self.put_indices])
        return ((), ()) if self.staging.is_fixed else (buffers, self.staging.in_place)

    def launched(self) -> None:
        """Notes that the graph was launched on the current stream."""
        if self.put_indices:
            self.staging.launched(torch.cuda.current_stream(self._device))

    def indices_at(self, source: int) -> list[int]:
        """The inputs that are staged in the same memory."""
        numbers = self.staging.sources[source].numbers
        return [self.indices[n] for n in numbers if self.indices[n] in self.put_indices]
