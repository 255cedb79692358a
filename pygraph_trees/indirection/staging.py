"""Staging: how a recording takes inputs that lie on the CPU.

The graph holds a copy from pinned memory to the GPU for each. Before a launch the inputs of a call are written to
memory that no queued launch still reads, and the copies are given its addresses: nothing is waited for unless all
buffers are in use. Where the GPU keeps up it is the same one each time, and the graph need not be changed.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..host_reads import HostRead

MOST_BUFFERS = 8  # launches that may be queued before the next one waits
_MOST_NBYTES = 64 << 20  # of the buffers of a recording, where two do not take more
# From 32768 elements on torch shares a copy out among threads, for which each call waits where the machine runs others
# in their place: 8 ms a call were measured on an H200's host for 300 KB.
_COPIED_BY_TORCH = (32 << 10) - 1  # bytes, at most


@dataclass(slots=True, eq=False)
class _Buffer:
    """Memory for all inputs."""

    memories: Sequence[torch.Tensor]
    addresses: list[int]
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
        nbytes = sum(tensor.numel() * tensor.element_size() for tensor in inputs)
        self._most = max(2, min(MOST_BUFFERS, _MOST_NBYTES // max(1, nbytes)))
        self._next = _buffer_like(inputs)
        self.stand_ins = self._next.memories  # what is recorded; they are a buffer like all others afterwards
        self._buffers = [self._next]
        self._reads = [HostRead.IN_ORDER] * len(inputs)
        if _are_pinned(inputs):
            torch.cuda.synchronize(device)
        self._write(inputs)
        # torch hands pinned memory on at once where it does not know who reads it.
        weakref.finalize(self, _wait_for, self._buffers).atexit = False

    def take(self, numbers: Sequence[int], reads: Mapping[int, HostRead]) -> None:
        """Before the first launch: of the inputs, by number, those that are given at each one, and how they are read.

        What is not known is read in order.
        """
        self._reads = [reads.get(number, HostRead.IN_ORDER) for number in numbers]
        self._next.memories = [self.stand_ins[number] for number in numbers]
        self._next.addresses = [memory.data_ptr() for memory in self._next.memories]

    @property
    def addresses(self) -> list[int]:
        """Where the inputs of the call are that was put last, or of the one that is recorded."""
        return self._next.addresses

    def put(self, values: Sequence[torch.Tensor]) -> list[int]:
        """Writes the inputs of a call; gives their addresses. Until :meth:`launched` they may be written over.

        Pinned memory may be what the GPU has still to write: it is waited for, or read in its place.
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
        buffer.addresses = [memory.data_ptr() for memory in buffer.memories]
        buffer.held = []
        waits = False
        for number, (memory, value, read) in enumerate(zip(buffer.memories, values, self._reads, strict=True)):
            if read is HostRead.AT_ONCE or not value.is_pinned():
                continue
            if read is HostRead.LATER and not self.is_fixed and _are_alike(memory, value):
                buffer.addresses[number] = value.data_ptr()
                buffer.held.append(value)
            else:
                waits = True
        if waits:
            torch.cuda.current_stream(self._device).synchronize()
        self._write(values)
        return buffer.addresses

    @property
    def in_place(self) -> list[int]:
        """Of what was put last, by number, what is read in the program's memory: another one may lie there next."""
        buffer = self._next
        return [n for n, memory in enumerate(buffer.memories) if buffer.addresses[n] != memory.data_ptr()]

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
                buffers.append(_buffer_like(buffers[0].memories))
                return buffers[-1]
            buffers[0].read.synchronize()
        buffers.append(buffers.pop(0))
        return buffers[-1]

    def _write(self, values: Sequence[torch.Tensor]) -> None:
        for memory, value, address in zip(self._next.memories, values, self._next.addresses, strict=True):
            if address != memory.data_ptr():
                continue  # it is read where it is
            if value.nbytes > _COPIED_BY_TORCH and _are_alike(memory, value):
                ctypes.memmove(memory.data_ptr(), value.data_ptr(), value.nbytes)
            else:
                memory.copy_(value.detach() if value.requires_grad else value)


def _are_pinned(values: Sequence[torch.Tensor]) -> bool:
    """Whether the GPU may be about to write to one: the program's own copy comes behind that, in its stream."""
    return any(value.is_pinned() for value in values)


def _are_alike(memory: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether the bytes of one are those of the other; ``memory`` is dense."""
    return (
        (value.dtype, value.shape, value.stride()) == (memory.dtype, memory.shape, memory.stride())
        and not value.is_conj()
        and not value.is_neg()
    )


def _buffer_like(tensors: Sequence[torch.Tensor]) -> _Buffer:
    with torch.inference_mode(False):  # what is made in that mode cannot be written to outside of it
        memories = [pinned_like(tensor) for tensor in tensors]
    return _Buffer(memories, [memory.data_ptr() for memory in memories])


def _is_free(buffer: _Buffer) -> bool:
    return buffer.read is None or buffer.read.query()


def _wait_for(buffers: list[_Buffer]) -> None:
    for buffer in buffers:
        if buffer.read is not None:
            buffer.read.synchronize()


def pinned_like(tensor: torch.Tensor) -> torch.Tensor:
    """Dense memory of the same strides where they are dense, which a copy to the GPU has as well."""
    return torch.empty_like(tensor, device="cpu", pin_memory=True)
