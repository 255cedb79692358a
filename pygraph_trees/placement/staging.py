"""The operator ``pygraph_trees::staged``, by which a compiled graph takes a CPU tensor.

It copies the tensor to the GPU of another tensor, and Inductor leaves it in the partition that needs it. In a CUDA
graph that we record, one copy of a block serves all values in the block (:class:`Observed`). Everywhere else the
operator waits for the GPU only if the program's own copy does.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

from pygraph_trees.cuda.extent import flat
from pygraph_trees.cuda.host_reads import HostRead

_library = torch.library.Library("pygraph_trees", "DEF")
# Inductor takes the first tensor's device as the operator's.
_library.define("staged(Tensor there, Tensor host, int read=1) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
_observed = threading.local()
_ALIGNMENT = 64  # bytes; compiled code assumes that an operator returns aligned memory

Copy = Callable[[torch.Tensor, torch.Tensor], object]  # from the second one to the first


class Observed:
    """The values staged while a function is captured, and the copy of the block that serves them.

    The graph copies the block once for each stream that needs it, so a copy precedes every view in the view's own
    stream. No byte of the copy serves two values: compiled code may write to one of them in place.
    """

    def __init__(self, block: torch.Tensor | None, copy: Copy | None) -> None:
        self.reads: list[tuple[int, HostRead]] = []  # CPU address of each value, and when the program reads it
        self.copied: list[int] = []  # CPU address at which each captured copy begins
        self._block, self._copy = block, copy or (lambda there, host: there.copy_(host, non_blocking=True))
        self._copies: dict[int, torch.Tensor] = {}  # on the GPU, by stream
        self._given: dict[int, list[tuple[int, int]]] = {}  # by stream: first byte, and the byte after the last

    def staged(self, there: torch.Tensor, host: torch.Tensor) -> torch.Tensor:
        """The value of ``host`` on the GPU of ``there``, copied by the graph directly from the memory of ``host``."""
        made = _like(there, host)
        if not host.numel():
            return made
        if made.stride() != host.stride():
            # Torch would gather the elements on the CPU, into memory that a replay does not write.
            return made.copy_(self.staged(there, flat(host)).as_strided(host.shape, host.stride()))
        if (view := self._view(there.device, host)) is not None:
            return view
        self.copied.append(host.data_ptr())
        self._copy(made, host)
        return made

    def _view(self, device: torch.device, host: torch.Tensor) -> torch.Tensor | None:
        """A dense tensor's bytes in the copy of the block; None if they are outside, misaligned or already taken."""
        if self._block is None:
            return None
        begin = host.data_ptr() - self._block.data_ptr()
        end = begin + host.numel() * host.element_size()
        stream = _stream(device)
        given = self._given.setdefault(stream, [])
        is_free = all(end <= other_begin or other_end <= begin for other_begin, other_end in given)
        if not (begin >= 0 and end <= self._block.numel() and begin % _ALIGNMENT == 0 and is_free):
            return None
        if (copy := self._copies.get(stream)) is None:
            self.copied.append(self._block.data_ptr())
            copy = self._copies[stream] = torch.empty(self._block.numel(), dtype=torch.uint8, device=device)
            self._copy(copy, self._block)
        given.append((begin, end))
        return copy[begin:end].view(host.dtype).as_strided(host.shape, host.stride())

    def with_own_memory(self, outputs: Any) -> Any:
        """Moves outputs that share the copy of the block, which each would keep alive, to memory of their own."""
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
            if (memory := own.get((stream, begin, end))) is None:
                memory = own[stream, begin, end] = self._copies[stream].new_empty(end - begin)
            offset = (at - begin) // nbytes
            several[position] = memory.view(output.dtype).as_strided(output.shape, output.stride(), offset)
        if not own:
            return outputs
        torch._foreach_copy_(list(own.values()), [self._copies[stream][b:e] for stream, b, e in own])
        return several


@contextlib.contextmanager
def observed(block: torch.Tensor | None = None, copy: Copy | None = None) -> Iterator[Observed]:
    """Collects what this thread stages inside; ``copy`` captures the copies, by default as copy nodes."""
    outer = getattr(_observed, "found", None)
    found = Observed(block, copy)
    _observed.found = found
    try:
        yield found
    finally:
        _observed.found = outer
        found._copies.clear()  # tensors that still need the memory hold it


def _staged(there: torch.Tensor, host: torch.Tensor, read: int = HostRead.IN_ORDER) -> torch.Tensor:
    found: Observed | None = getattr(_observed, "found", None)
    if found is None:
        return _copied(there, host, HostRead(read))
    found.reads.append((host.data_ptr(), HostRead(read)))
    return found.staged(there, host) if _is_captured(there) else _copied(there, host, HostRead(read))


def _copied(there: torch.Tensor, host: torch.Tensor, read: HostRead) -> torch.Tensor:
    """A copy outside of the graphs that we record, which waits for the GPU only if the program's own copy does.

    CUDA does not promise that an asynchronous copy has read pageable memory when the call returns, nor that the call
    does not wait for its stream first (CUDA Runtime API, "API synchronization behavior", asynchronous memcpy, 1 and 3).
    So the value is first written to torch's pinned memory, which torch reuses only after the copy is done. The
    program's own pinned memory is the exception: the GPU may still have to write it, so it is read in stream order.

    In a graph that the program captures, replays would read memory that nothing keeps alive. There the copy blocks, so
    torch raises, unless the program asks for its own pinned memory to be read later.
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
    """A copy in pinned memory, with the strides of its copy on the GPU."""
    return torch.empty_like(host, pin_memory=True).copy_(host)


def _is_between_devices(there: torch.Tensor, host: torch.Tensor) -> bool:
    """Whether this is a copy from CPU to GPU; an input that was moved to the GPU for a recording needs none."""
    return there.is_cuda and host.is_cpu


def _is_captured(there: torch.Tensor) -> bool:
    return there.is_cuda and torch.cuda.is_current_stream_capturing()


def _stream(device: torch.device) -> int:
    return torch.cuda.current_stream(device).cuda_stream


def _like(there: torch.Tensor, host: torch.Tensor, read: int = HostRead.IN_ORDER) -> torch.Tensor:
    return torch.empty_like(host, device=there.device)  # with the strides of a dense `host`


_library.impl("staged", _staged, "CPU")
_library.impl("staged", _staged, "CUDA")
torch.library.register_fake("pygraph_trees::staged", _like, lib=_library)

staged = torch.ops.pygraph_trees.staged.default
