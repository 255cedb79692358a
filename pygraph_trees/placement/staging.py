"""The operator by which a compiled graph takes a tensor of the CPU: Inductor leaves it in the graph's GPU part.

``pygraph_trees::staged`` copies a tensor to the GPU of another one, inside the partition that needs it. In a CUDA graph
that we record, one copy of a pinned block serves all values in the block (:class:`Observed`). Everywhere else the
operator adds no wait for the GPU to those of the program.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch

from pygraph_trees.cuda.extent import flat
from pygraph_trees.cuda.host_reads import HostRead

_library = torch.library.Library("pygraph_trees", "DEF")
# Inductor takes the first tensor's device for the operator's.
_library.define("staged(Tensor there, Tensor host, int read=1) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
_observed = threading.local()
_ALIGNMENT = 64  # bytes; compiled code takes what an operator returns to be aligned


class Observed:
    """What is staged while a function is captured, and the copy of the pinned block that serves it.

    The graph copies the block once for each stream that needs it, so every view has a copy before it in its own stream.
    No byte of the copy is given to two values: compiled code may write to one of them in place.
    """

    def __init__(self, block: torch.Tensor | None) -> None:
        self.reads: list[tuple[int, HostRead]] = []  # address of each value on the CPU, and when the program reads it
        self.copied: list[int] = []  # where on the CPU each copy begins that was captured for them
        self._block = block
        self._copies: dict[int, torch.Tensor] = {}  # on the GPU, by stream
        self._given: dict[int, list[tuple[int, int]]] = {}  # by stream: first byte and the one after the last

    def staged(self, there: torch.Tensor, host: torch.Tensor) -> torch.Tensor:
        """The value of ``host`` on the GPU of ``there``, copied by the graph from the very memory of ``host``."""
        made = _like(there, host)
        if not host.numel():
            return made
        if made.stride() != host.stride():
            # Torch would gather the elements on the CPU, in memory that a replay does not write.
            whole = self.staged(there, flat(host))
            return made.copy_(whole.as_strided(host.shape, host.stride()))
        view = self._view(there.device, host)
        if view is not None:
            return view
        self.copied.append(host.data_ptr())
        return made.copy_(host, non_blocking=True)

    def _view(self, device: torch.device, host: torch.Tensor) -> torch.Tensor | None:
        """The bytes of a dense tensor in the copy of the block; None if they are not there, not aligned or not free."""
        if self._block is None:
            return None
        begin = host.data_ptr() - self._block.data_ptr()
        end = begin + host.numel() * host.element_size()
        stream = _stream(device)
        given = self._given.setdefault(stream, [])
        if begin < 0 or end > self._block.numel() or begin % _ALIGNMENT:
            return None
        if any(begin < other_end and other_begin < end for other_begin, other_end in given):
            return None
        copy = self._copies.get(stream)
        if copy is None:
            self.copied.append(self._block.data_ptr())
            copy = torch.empty(self._block.numel(), dtype=torch.uint8, device=device)
            self._copies[stream] = copy.copy_(self._block, non_blocking=True)
        given.append((begin, end))
        return copy[begin:end].view(host.dtype).as_strided(host.shape, host.stride())

    def with_own_memory(self, outputs: Any) -> Any:
        """The outputs of the function, with those on the copy of the block moved to memory of their own.

        Compiled code may return memory of a value that it needs no longer. In the copy, outputs would share a storage,
        and each would keep all of it.
        """
        starts = {copy.untyped_storage().data_ptr(): stream for stream, copy in self._copies.items()}
        several = list(outputs) if isinstance(outputs, (list, tuple)) else [outputs]
        own: dict[tuple[int, int, int], torch.Tensor] = {}
        for position, output in enumerate(several):
            is_strided = isinstance(output, torch.Tensor) and output.layout is torch.strided
            stream = starts.get(output.untyped_storage().data_ptr()) if starts and is_strided else None
            if stream is None:
                continue
            at, nbytes = output.storage_offset() * output.element_size(), output.element_size()
            begin, end = next((s for s in self._given[stream] if s[0] <= at < s[1]), (at, at + nbytes))
            memory = own.get((stream, begin, end))
            if memory is None:
                memory = own[stream, begin, end] = self._copies[stream].new_empty(end - begin)
            offset = (at - begin) // nbytes
            several[position] = memory.view(output.dtype).as_strided(output.shape, output.stride(), offset)
        if not own:
            return outputs
        torch._foreach_copy_(list(own.values()), [self._copies[stream][b:e] for stream, b, e in own])
        return several

    def close(self) -> None:
        """Lets go of the copies: whatever still needs the memory holds it."""
        self._copies.clear()


@contextlib.contextmanager
def observed(block: torch.Tensor | None = None) -> Iterator[Observed]:
    """What is staged inside, in this thread.

    Args:
        block: pinned memory, in bytes, of values that one copy may take to the GPU while a graph is captured.
    """
    outer = getattr(_observed, "found", None)
    found = Observed(block)
    _observed.found = found
    try:
        yield found
    finally:
        _observed.found = outer
        found.close()


def _staged(there: torch.Tensor, host: torch.Tensor, read: int = HostRead.IN_ORDER) -> torch.Tensor:
    found: Observed | None = getattr(_observed, "found", None)
    if found is None:
        return _copied(there, host, HostRead(read))
    found.reads.append((host.data_ptr(), HostRead(read)))
    return found.staged(there, host) if _is_captured(there) else _copied(there, host, HostRead(read))


def _copied(there: torch.Tensor, host: torch.Tensor, read: HostRead) -> torch.Tensor:
    """A copy outside of the graphs that we record, which waits for the GPU only if the program's own copy does.

    CUDA does not promise that an asynchronous copy has read pageable memory when the call returns, nor that it does not
    wait for its stream before (CUDA Runtime API, "API synchronization behavior", asynchronous memcpy, 1 and 3). So the
    value is written to pinned memory of torch's first, which torch gives to others only after the copy is done. Pinned
    memory of the program's is the exception: the GPU may have still to write it, so it is read in the stream's order.

    In a graph that the program captures, replays would read memory that nobody holds. The copy waits, for which torch
    raises, unless the program asks for pinned memory of its own to be read later.
    """
    made = _like(there, host)
    if not _is_between_devices(there, host):
        return made.copy_(host)
    is_captured = _is_captured(there)
    if is_captured or (read is not HostRead.AT_ONCE and host.is_pinned()):
        is_late = read is HostRead.LATER and (not is_captured or host.is_pinned())
        return made.copy_(host, non_blocking=is_late)
    return made.copy_(_pinned(host), non_blocking=True)


def _pinned(host: torch.Tensor) -> torch.Tensor:
    """A copy in pinned memory, dense as its copy on the GPU is."""
    return torch.empty_like(host, pin_memory=True).copy_(host)


def _is_between_devices(there: torch.Tensor, host: torch.Tensor) -> bool:
    """Not so for an input on the GPU that was copied while a graph was recorded."""
    return there.is_cuda and host.is_cpu


def _is_captured(there: torch.Tensor) -> bool:
    return there.is_cuda and torch.cuda.is_current_stream_capturing()


def _stream(device: torch.device) -> int:
    return torch.cuda.current_stream(device).cuda_stream


def _like(there: torch.Tensor, host: torch.Tensor, read: int = HostRead.IN_ORDER) -> torch.Tensor:
    return torch.empty_like(host, device=there.device)  # of the same strides where they are dense


_library.impl("staged", _staged, "CPU")
_library.impl("staged", _staged, "CUDA")
torch.library.register_fake("pygraph_trees::staged", _like, lib=_library)

staged = torch.ops.pygraph_trees.staged.default
