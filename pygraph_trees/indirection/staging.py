"""Staging: how a recording takes inputs that are on the CPU.

Before a launch all inputs of a call are written to one pinned block that no queued launch still reads. In the graph,
one copy takes most of them, and the others have copies of their own (:class:`Source`); these are given the block's
addresses. Nothing is waited for unless all blocks are in use. If the GPU keeps up it is the same block each time.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from pygraph_trees.cuda.host_reads import HostRead

MOST_BUFFERS = 8  # launches that may be queued before the next one waits
_MOST_NBYTES = 64 << 20  # of the buffers of a recording, where two do not take more
# From 32768 elements on torch shares a copy out among threads, for which each call waits where the machine runs others
# in their place: 8 ms a call were measured on an H200's host for 300 KB.
_COPIED_BY_TORCH = (32 << 10) - 1  # bytes, at most
# Placement stages no larger value: a larger input is read in part, and the common copy would take all of it.
_MOST_TOGETHER_NBYTES = 320 << 10
# Torch's own allocations begin at multiples of 512 bytes, and libraries choose kernels by alignment.
_ALIGNMENT, _SMALL_ALIGNMENT = 512, 64


@dataclass(frozen=True, slots=True)
class Source:
    """Memory in a buffer whose address a graph is given: what one copy takes, or what copies of one input read."""

    start: int  # bytes from the buffer's begin
    nbytes: int
    numbers: tuple[int, ...]  # its inputs


@dataclass(frozen=True, slots=True)
class _Place:
    """Where an input is in each buffer: dense, and with its own strides if these are dense."""

    start: int
    nbytes: int
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]

    def within(self, block: torch.Tensor) -> torch.Tensor:
        """A tensor there with a storage of its own, by which a recording knows an input; it holds the block."""
        memory = (ctypes.c_char * self.nbytes).from_address(block.data_ptr() + self.start)
        memory.block = block  # type: ignore[attr-defined]
        with torch.inference_mode(False):  # a tensor made in that mode cannot be written to outside of it
            return torch.frombuffer(memory, dtype=torch.uint8).view(self.dtype).as_strided(self.shape, self.stride)


@dataclass(slots=True, eq=False)
class _Buffer:
    """A pinned block, and the memory in it of the inputs that are given at each launch."""

    block: torch.Tensor
    memories: list[torch.Tensor]
    read: Any = None  # an event behind the last launch that reads it; None before the first
    held: list[torch.Tensor] = field(default_factory=list)  # inputs that it reads in their own memory


class Staging:
    """The buffers of one recording."""

    is_fixed = False  # whether the graph reads the first buffer at each launch

    def __init__(self, inputs: Sequence[torch.Tensor], device: int | None = None) -> None:
        """
        Args:
            inputs: of the call that is recorded, on the CPU; their values are in the first buffer.
            device: whose current stream reads them; torch's current one where it is not given.
        """
        self._device = device
        # What is pinned may be read in its own place.
        pinned = [tensor.is_pinned() for tensor in inputs]
        self.sources, self._places = _laid_out(inputs, pinned)
        self._nbytes = max(source.start + source.nbytes for source in self.sources)
        self._most = max(2, min(MOST_BUFFERS, _MOST_NBYTES // max(1, self._nbytes)))
        block = pinned_bytes(self._nbytes)
        self._recorded = block
        self.placeholder_tensors = [place.within(block) for place in self._places]  # what is recorded
        self._next = _Buffer(block, self.placeholder_tensors)  # a buffer like all others afterwards
        self._buffers = [self._next]
        self.take(range(len(inputs)), {}, range(len(self.sources)))
        if any(pinned):  # the GPU may be about to write to one: the program's own copy comes after that
            torch.cuda.synchronize(device)
        self._write(inputs, {})
        # torch hands pinned memory on at once where it does not know who reads it.
        weakref.finalize(self, _wait_for, self._buffers).atexit = False

    @property
    def together(self) -> torch.Tensor | None:
        """The bytes of the recorded buffer that one copy takes; None if no two inputs can share one."""
        first = self.sources[0]
        return self._recorded[: first.nbytes] if len(first.numbers) > 1 else None

    @property
    def recorded(self) -> list[tuple[int, int]]:
        """Address and size in bytes of each source, as it is recorded."""
        begin = self._recorded.data_ptr()
        return [(begin + source.start, source.nbytes) for source in self.sources]

    def source_of(self, number: int) -> int:
        """The position among the sources of an input's memory."""
        return next(position for position, source in enumerate(self.sources) if number in source.numbers)

    def take(self, numbers: Sequence[int], reads: Mapping[int, HostRead], sources: Sequence[int]) -> None:
        """Before the first launch: the inputs that each launch is given.

        Args:
            numbers: of the inputs.
            reads: how they are read, by number; in order if that is not known.
            sources: positions of those whose addresses the graph holds.
        """
        self._numbers, self._taken = list(numbers), list(sources)
        given = {source: position for position, source in enumerate(self._taken)}
        # What may be pinned in a later call: its position among those given, how it is read, and among the addresses
        # that of its own source, if it has one.
        self._asked: list[tuple[int, HostRead, int | None]] = []
        for position, number in enumerate(self._numbers):
            read, source = reads.get(number, HostRead.IN_ORDER), self.source_of(number)
            if read is not HostRead.AT_ONCE:
                is_own = len(self.sources[source].numbers) == 1
                self._asked.append((position, read, given.get(source) if is_own else None))
        self._next.memories = [self.placeholder_tensors[number] for number in self._numbers]
        self._are_small = all(memory.nbytes <= _COPIED_BY_TORCH for memory in self._next.memories)
        self.in_place: list[int] = []

    def put(self, values: Sequence[torch.Tensor]) -> list[int]:
        """Writes the inputs of a call; gives the addresses of the sources. Until :meth:`launched` they may be written
        over.

        Pinned memory may be what the GPU has still to write: it is waited for, or read in its place; positions of
        sources that are read so are :attr:`in_place` until the next call. To be called only if the current stream is
        not captured: a wait ends a capture, and the captured launch would read the buffer again after later calls have
        written to it.
        """
        if self.is_fixed:
            if self._next.read is not None:
                self._next.read.synchronize()
        else:
            self._next = self._free()
        for buffer in self._buffers:
            if buffer.held and _is_free(buffer):
                buffer.held = []
        buffer = self._next
        begin = buffer.block.data_ptr()
        addresses = [begin + self.sources[source].start for source in self._taken]
        in_place: dict[int, int] = {}  # by position of an input, its source's
        waits = False
        for position, read, source in self._asked:
            value = values[position]
            if not value.is_pinned():
                continue
            may_stay = read is HostRead.LATER and source is not None and not self.is_fixed
            if may_stay and source is not None and _are_alike(buffer.memories[position], value):
                in_place[position] = source
                addresses[source] = value.data_ptr()
            else:
                waits = True
        buffer.held = [values[position] for position in in_place]
        self.in_place = list(in_place.values())  # another tensor may be at the same address next
        if waits:
            torch.cuda.current_stream(self._device).synchronize()
        self._write(values, in_place)
        return addresses

    def launched(self, stream: Any) -> None:
        """Behind a launch on that stream, which reads what was put."""
        if self._next.read is None:
            self._next.read = torch.cuda.Event()
        self._next.read.record(stream)

    def _free(self) -> _Buffer:
        """A buffer that nothing reads. The last is what the graph holds; the others were read before, in order."""
        buffers = self._buffers
        if _is_free(buffers[-1]):
            return buffers[-1]
        if not _is_free(buffers[0]):
            if len(buffers) < self._most:
                block = pinned_bytes(self._nbytes)
                buffers.append(_Buffer(block, [self._places[number].within(block) for number in self._numbers]))
                return buffers[-1]
            buffers[0].read.synchronize()
        buffers.append(buffers.pop(0))
        return buffers[-1]

    def _write(self, values: Sequence[torch.Tensor], in_place: Mapping[int, int]) -> None:
        memories = self._next.memories
        if self._are_small and not in_place:
            to, of = memories, list(values)
        else:
            to, of = [], []
            for position, (memory, value) in enumerate(zip(memories, values, strict=True)):
                if position in in_place:
                    continue
                if value.nbytes > _COPIED_BY_TORCH and _are_alike(memory, value):
                    ctypes.memmove(memory.data_ptr(), value.data_ptr(), value.nbytes)
                else:
                    to.append(memory)
                    of.append(value)
        if to:
            with torch.no_grad():
                torch._foreach_copy_(to, of)  # 23 us for 48 numbers, in a loop of copies 55 (measured)


def _laid_out(inputs: Sequence[torch.Tensor], pinned: Sequence[bool]) -> tuple[list[Source], list[_Place]]:
    """Sources, that of several inputs first, and the place of each input."""
    numbers = range(len(inputs))
    layouts = [torch.empty_like(tensor, device="meta") for tensor in inputs]  # dense: what a copy to the GPU has too
    together = [n for n in numbers if not pinned[n] and layouts[n].nbytes <= _MOST_TOGETHER_NBYTES]
    if len(together) < 2:
        together = []
    places: dict[int, _Place] = {}
    sources: list[Source] = []
    end = 0
    for n in [*together, *(n for n in numbers if n not in together)]:
        layout = layouts[n]
        alignment = _ALIGNMENT if layout.nbytes >= _ALIGNMENT else _SMALL_ALIGNMENT
        start = -(-end // alignment) * alignment
        end = start + layout.nbytes
        places[n] = _Place(start, layout.nbytes, layout.dtype, layout.shape, layout.stride())
        if n not in together:
            sources.append(Source(start, layout.nbytes, (n,)))
        elif n == together[-1]:
            sources.append(Source(0, end, tuple(together)))
    return sources, [places[n] for n in numbers]


def _are_alike(memory: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether the bytes of one are those of the other; ``memory`` is dense."""
    return (
        (value.dtype, value.shape, value.stride()) == (memory.dtype, memory.shape, memory.stride())
        and value.is_cpu
        and not value.is_conj()
        and not value.is_neg()
    )


def _is_free(buffer: _Buffer) -> bool:
    return buffer.read is None or buffer.read.query()


def _wait_for(buffers: list[_Buffer]) -> None:
    for buffer in buffers:
        if buffer.read is not None:
            buffer.read.synchronize()


def pinned_bytes(nbytes: int) -> torch.Tensor:
    """Pinned memory of the CPU."""
    with torch.inference_mode(False):
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
