"""Staging: how a recording gets inputs that are on the CPU: small ones by value, others from pinned memory.

:func:`staging_for` decides which. Before a launch, :meth:`Staging.put` writes the call's inputs to a pinned block that
no queued launch still reads, and returns the addresses for the graph's copies (:class:`Source`): one copy takes most
inputs, the others have their own. It waits only if all blocks are in use, or for a pinned input that the GPU may still
write to, unless the graph reads it in place.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from pygraph_trees.cuda.host_reads import HostRead
from pygraph_trees.cuda.progress import without_disturbing_captures
from pygraph_trees.cuda.value_kernel import ValueKernel, value_kernel

if TYPE_CHECKING:
    from pygraph_trees.cuda.driver import Driver

MOST_BUFFERS = 8  # launches that may be queued before the next one waits
_MOST_NBYTES = 64 << 20  # for all buffers of a recording, unless two of them take more
# From 32768 elements on, torch divides a copy among threads. If the machine runs other threads in their place, each
# call waits for them: 8 ms a call for 300 KB (measured on an H200's host).
_COPIED_BY_TORCH = (32 << 10) - 1  # bytes, at most
# A larger input has its own copy: the program may read only a part of it, and the common copy would take all of it.
_MOST_TOGETHER_NBYTES = 320 << 10
# Torch's allocations begin at multiples of 512 bytes, and libraries choose kernels by alignment.
_ALIGNMENT, _SMALL_ALIGNMENT = 512, 64


@dataclass(frozen=True, slots=True)
class Source:
    """Memory in a buffer whose address a graph is given: several inputs that one copy takes, or a single input."""

    start: int  # bytes from the start of the buffer
    nbytes: int
    numbers: tuple[int, ...]  # of its inputs


@dataclass(frozen=True, slots=True)
class _Place:
    """An input's place in each buffer. It is dense there, with its own strides if these are dense."""

    start: int
    nbytes: int
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]

    def within(self, block: torch.Tensor) -> torch.Tensor:
        """A tensor in the block with its own storage, which identifies the input; it keeps the block alive."""
        memory = (ctypes.c_char * self.nbytes).from_address(block.data_ptr() + self.start)
        memory.block = block  # type: ignore[attr-defined]
        with torch.inference_mode(False):  # a tensor made in inference mode cannot be written to outside of it
            return torch.frombuffer(memory, dtype=torch.uint8).view(self.dtype).as_strided(self.shape, self.stride)


@dataclass(frozen=True, slots=True)
class Layout:
    """The sources in a buffer, starting with that of several inputs, and the place of each input."""

    sources: list[Source]
    places: list[_Place]

    @property
    def nbytes(self) -> int:
        return max(source.start + source.nbytes for source in self.sources)


@dataclass(slots=True, eq=False)
class _Buffer:
    """A block, and tensors in it for the inputs of each launch."""

    block: torch.Tensor
    memories: list[torch.Tensor]
    read: Any = None  # an event after the last launch that reads it; None before the first
    held: list[torch.Tensor] = field(default_factory=list)  # inputs that this launch reads in their own memory


class Staging:
    is_fixed = False  # whether the graph reads the first buffer at each launch

    def __init__(self, inputs: Sequence[torch.Tensor], device: int | None = None, layout: Layout | None = None) -> None:
        """
        Args:
            inputs: CPU inputs of the recorded call, whose values are written to the first buffer.
            device: the device whose current stream reads them; torch's current device by default.
            layout: by default, one copy takes small inputs that are not pinned.
        """
        self._device = device
        pinned = [tensor.is_pinned() for tensor in inputs]
        layout = layout or laid_out(inputs, _together(inputs, pinned))
        self.sources, self._places, self._nbytes = layout.sources, layout.places, layout.nbytes
        self._most = max(2, min(MOST_BUFFERS, _MOST_NBYTES // max(1, self._nbytes)))
        block = self._block(self._nbytes)
        self._recorded = block
        first, begin = self.sources[0], block.data_ptr()
        # The bytes of the recorded buffer that one copy takes; None if no two inputs can share a copy.
        self.together = block[: first.nbytes] if len(first.numbers) > 1 else None
        # Recorded address, and size in bytes, of each source.
        self.recorded = [(begin + source.start, source.nbytes) for source in self.sources]
        self.placeholder_tensors = [place.within(block) for place in self._places]  # for the recording
        self._next = _Buffer(block, self.placeholder_tensors)  # used like all other buffers later
        self._buffers = [self._next]
        self.take(range(len(inputs)), {}, range(len(self.sources)))
        if any(pinned):  # the GPU may still have to write to one, before the program's own copy
            torch.cuda.synchronize(device)
        self._write(inputs, {})
        # Torch reuses pinned memory at once if it does not know that a stream reads it.
        weakref.finalize(self, _wait_for, self._buffers).atexit = False

    def _block(self, nbytes: int) -> torch.Tensor:
        return pinned_bytes(nbytes)

    def source_of(self, number: int) -> int:
        """The position of an input's source among the sources."""
        return next(position for position, source in enumerate(self.sources) if number in source.numbers)

    def take(self, numbers: Sequence[int], reads: Mapping[int, HostRead], sources: Sequence[int]) -> None:
        """Chooses, before the first launch, the inputs that each launch is given.

        Args:
            reads: how they are read, by number; in order if that is not known.
            sources: positions of the sources whose addresses the graph holds.
        """
        self._numbers, self._taken = list(numbers), list(sources)
        given = {source: position for position, source in enumerate(self._taken)}
        # Inputs that may be pinned in a later call: the input's position among those given, how it is read, and the
        # position of its own source among the addresses, if it has one.
        self._asked: list[tuple[int, HostRead, int | None]] = []
        for position, number in enumerate(self._numbers):
            read, source = reads.get(number, HostRead.IN_ORDER), self.source_of(number)
            if read is not HostRead.AT_ONCE:
                is_own = len(self.sources[source].numbers) == 1
                self._asked.append((position, read, given.get(source) if is_own else None))
        self._next.memories = [self.placeholder_tensors[number] for number in self._numbers]
        self._are_small = all(memory.nbytes <= _COPIED_BY_TORCH for memory in self._next.memories)
        self.in_place: list[int] = []

    @without_disturbing_captures()
    def put(self, values: Sequence[torch.Tensor]) -> list[int]:
        """Writes the inputs of a call to a buffer, and returns the addresses of the sources.

        The buffer may be overwritten until :meth:`launched` is called. An input in pinned memory is waited for, or read
        in its own place, and :attr:`in_place` holds the positions of sources read so until the next call. The current
        stream must not be capturing: a captured launch would read the buffer after later calls have written to it.
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
        in_place: dict[int, int] = {}  # position of the source, by position of the input
        waits = False
        for position, read, source in self._asked:
            value = values[position]
            if not value.is_pinned():
                continue
            may_stay = read is HostRead.LATER and not self.is_fixed and _are_alike(buffer.memories[position], value)
            if may_stay and source is not None:
                in_place[position] = source
                addresses[source] = value.data_ptr()
            else:
                waits = True
        buffer.held = [values[position] for position in in_place]
        self.in_place = list(in_place.values())  # at the next call, another tensor may be at the same address
        if waits:
            torch.cuda.current_stream(self._device).synchronize()
        self._write(values, in_place)
        return addresses

    def launched(self, stream: Any) -> None:
        """Call after the launch, on ``stream``, that reads the inputs that were put."""
        if self._next.read is None:
            self._next.read = torch.cuda.Event()
        self._next.read.record(stream)

    def _free(self) -> _Buffer:
        """A buffer that no launch reads. The graph holds the last one; launches read the others earlier, in order."""
        buffers = self._buffers
        if _is_free(buffers[-1]):
            return buffers[-1]
        if not _is_free(buffers[0]):
            if len(buffers) < self._most:
                block = self._block(self._nbytes)
                buffers.append(_Buffer(block, [self._places[number].within(block) for number in self._numbers]))
                return buffers[-1]
            buffers[0].read.synchronize()
        buffers.append(buffers.pop(0))
        return buffers[-1]

    def _write(self, values: Sequence[torch.Tensor], in_place: Mapping[int, int]) -> None:
        to, of = self._next.memories, list(values)
        if not self._are_small or in_place:
            pairs = [pair for n, pair in enumerate(zip(to, of, strict=True)) if n not in in_place]
            to, of = [], []
            for memory, value in pairs:
                if value.nbytes > _COPIED_BY_TORCH and _are_alike(memory, value):
                    ctypes.memmove(memory.data_ptr(), value.data_ptr(), value.nbytes)
                else:
                    to.append(memory)
                    of.append(value)
        if to:
            with torch.no_grad():
                torch._foreach_copy_(to, of)  # 23 us for 48 numbers; a loop of copies takes 55 us (measured)


class StagedValues(Staging):
    """Small inputs on the CPU, which kernel nodes hold by value: the driver copies them when the nodes are set."""

    def __init__(self, kernel: ValueKernel, inputs: Sequence[torch.Tensor], layout: Layout, device: int) -> None:
        self._kernel = kernel
        self.nodes: dict[int, int] = {}  # that were captured, and the address from which each copies its bytes
        super().__init__(inputs, device, layout)

    def _block(self, nbytes: int) -> torch.Tensor:
        # The driver copies as many bytes as the kernel takes, also from the middle of the block.
        with torch.inference_mode(False):
            return torch.zeros(nbytes + self._kernel.width, dtype=torch.uint8, device="cpu")

    def capture(self, target: torch.Tensor, host: torch.Tensor) -> None:
        """Captures a kernel that will write ``host``, a part of the block, to new memory of the GPU; it holds zeros."""
        at, nbytes = host.data_ptr() - self._recorded.data_ptr(), host.numel() * host.element_size()
        if at < 0 or at + nbytes > self._nbytes:
            target.copy_(host, non_blocking=True)  # memory of another tensor: the graph will be refused
            return
        stream = torch.cuda.current_stream(self._device).cuda_stream
        self._kernel.launch(stream, target.data_ptr(), bytes(nbytes))
        if len(nodes := self._kernel.driver.captured_last(stream)) == 1:  # otherwise the graph will be refused
            self.nodes[nodes[0]] = host.data_ptr()

    def take(self, numbers: Sequence[int], reads: Mapping[int, HostRead], sources: Sequence[int]) -> None:
        super().take(numbers, reads, sources)
        # A pinned input is waited for, since the GPU may still have to write to it: nodes are set during the call.
        self._asked = [(position, read, None) for position, read, _ in self._asked]

    def put(self, values: Sequence[torch.Tensor]) -> list[int]:
        addresses = super().put(values)
        self.in_place = list(range(len(addresses)))  # the nodes hold earlier bytes
        return addresses

    @property
    def places(self) -> list[tuple[torch.Tensor, bool]]:
        """By input that is put: where it is written, and whether it must be waited for if it is pinned."""
        asked = {position for position, _, _ in self._asked}
        return [(memory, position in asked) for position, memory in enumerate(self._next.memories)]

    def launched(self, stream: Any) -> None:
        """Does nothing: no launch reads the block."""


def staging_for(driver: Driver, device: int, inputs: Sequence[torch.Tensor]) -> Staging:
    """The buffers of a recording with these inputs. Only a copy node can read a pinned one in its own place."""
    if not any(tensor.is_pinned() for tensor in inputs):
        layout = laid_out(inputs, range(len(inputs)))
        with torch.cuda.device(device):
            stream = torch.cuda.current_stream(device).cuda_stream
            kernel = value_kernel(driver, device, stream, layout.nbytes)
        if kernel is not None:
            return StagedValues(kernel, inputs, layout, device)
    return Staging(inputs, device)


def _together(inputs: Sequence[torch.Tensor], pinned: Sequence[bool]) -> list[int]:
    """The inputs that one copy takes. A pinned input has its own, since it may be read in its own place."""
    nbytes = [tensor.numel() * tensor.element_size() for tensor in inputs]
    found = [n for n in range(len(inputs)) if not pinned[n] and nbytes[n] <= _MOST_TOGETHER_NBYTES]
    return found if len(found) > 1 else []


def laid_out(inputs: Sequence[torch.Tensor], together: Sequence[int]) -> Layout:
    """A layout in which one source holds the inputs of these numbers."""
    numbers = range(len(inputs))
    layouts = [torch.empty_like(tensor, device="meta") for tensor in inputs]  # dense, as a copy to the GPU is
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
    return Layout(sources, [places[n] for n in numbers])


def _are_alike(memory: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether copying the bytes of ``value`` to ``memory``, which is dense, copies the tensor."""
    return (
        (value.dtype, value.shape, value.stride()) == (memory.dtype, memory.shape, memory.stride())
        and value.is_cpu
        and not value.is_conj()
        and not value.is_neg()
        and not value._is_zerotensor()  # it has no bytes
    )


def _is_free(buffer: _Buffer) -> bool:
    return buffer.read is None or buffer.read.query()


def _wait_for(buffers: list[_Buffer]) -> None:
    with without_disturbing_captures():
        for buffer in buffers:
            if buffer.read is not None:
                buffer.read.synchronize()


def pinned_bytes(nbytes: int) -> torch.Tensor:
    with torch.inference_mode(False):
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
