"""Staging: how a recording takes an input that lies on the CPU.

The graph holds a copy from pinned memory to the GPU. Before a launch the input is written to a buffer that no queued
launch still reads, and the copy is given that buffer's address: nothing is waited for unless all buffers are in use.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import torch

MOST_BUFFERS = 8  # of one input: launches that may be queued before the next one waits


@dataclass(slots=True, eq=False)
class _Buffer:
    memory: torch.Tensor
    read: Any = None  # an event behind the last launch that reads it; None before the first


class Staging:
    """The buffers of one input of a recording."""

    def __init__(self, like: torch.Tensor) -> None:
        """``like``: the input of the call that is recorded, on the CPU; its value is in the first buffer."""
        self._like = torch.empty_like(like, device="meta")
        self._next = self._buffer()
        self._stand_in = self._next.memory
        self._buffers = [self._next]
        self.is_fixed = False  # the graph reads the first buffer at each launch
        self.stand_in.copy_(like.detach())
        # torch hands pinned memory on at once where it does not know who reads it.
        weakref.finalize(self, _wait_for, self._buffers).atexit = False

    @property
    def stand_in(self) -> torch.Tensor:
        """What is recorded; it is a buffer like all others afterwards."""
        return self._stand_in

    def _buffer(self) -> _Buffer:
        with torch.inference_mode(False):  # what is made in that mode cannot be written to outside of it
            return _Buffer(pinned_like(self._like))

    def put(self, value: torch.Tensor) -> int:
        """Writes the input of a call to a buffer; gives its address. Until :meth:`launched` it may be written again."""
        if value.requires_grad:
            value = value.detach()
        if self.is_fixed:
            if self._next.read is not None:
                self._next.read.synchronize()
            self._next.memory.copy_(value)
            return self._next.memory.data_ptr()
        buffer = next((b for b in self._buffers if b.read is None or b.read.query()), None)
        if buffer is None and len(self._buffers) < MOST_BUFFERS:
            buffer = self._buffer()
            self._buffers.append(buffer)
        elif buffer is None:
            buffer = self._buffers[0]
            buffer.read.synchronize()
        # The one that was read first is asked first the next time.
        self._buffers.remove(buffer)
        self._buffers.append(buffer)
        buffer.memory.copy_(value)
        self._next = buffer
        return buffer.memory.data_ptr()

    def launched(self, stream: Any) -> None:
        """Behind a launch on that stream, which reads what was put."""
        if self._next.read is None:
            self._next.read = torch.cuda.Event()
        self._next.read.record(stream)


def _wait_for(buffers: list[_Buffer]) -> None:
    for buffer in buffers:
        if buffer.read is not None:
            buffer.read.synchronize()


def pinned_like(tensor: torch.Tensor) -> torch.Tensor:
    """Dense memory of the same strides where they are dense, which a copy to the GPU has as well."""
    return torch.empty_like(tensor, device="cpu", pin_memory=True)
