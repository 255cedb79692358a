"""Other threads, streams and devices for a call.

:class:`Threads` runs work in the thread that a case names and waits for it. :class:`Elsewhere` makes a stream or a
device current, and :class:`Reader` reads on another stream, with the waits that a correct program has. Threads that
make CUDA graphs have their own trees, cleared before the thread ends. What they return must not be in a graph's memory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from pygraph_trees.compat import has_trees_per_thread
from pygraph_trees.trees.hooks.manager_container import Trees

from .around import STREAMS

T = TypeVar("T")
DELAY = 1_000_000  # cycles of the GPU that delay a stream


class Threads:
    """The threads of one runner."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._workers: dict[int, tuple[ThreadPoolExecutor, contextlib.ExitStack]] = {}  # stacks are left in the worker

    def new(self, work: Callable[[], T]) -> T:
        """Runs ``work`` in a new thread, on the caller's current stream; returns its result or raises its error."""
        stream = torch.cuda.current_stream(self._device) if self._device.type == "cuda" else None

        def inside() -> T:
            with own_trees(self._device), torch.cuda.stream(stream):
                return work()

        with ThreadPoolExecutor(1) as pool:
            return pool.submit(inside).result()

    def worker(self, number: int, work: Callable[[], T]) -> T:
        """The result of ``work`` in a thread that lives until :meth:`close`; raises what ``work`` raises."""
        if number not in self._workers:
            self._workers[number] = (ThreadPoolExecutor(1), contextlib.ExitStack())
            pool, stack = self._workers[number]
            pool.submit(stack.enter_context, own_trees(self._device)).result()
        return self._workers[number][0].submit(work).result()

    def close(self) -> None:
        for pool, stack in self._workers.values():
            pool.submit(stack.close).result()
            pool.shutdown()
        self._workers.clear()


class Elsewhere:
    """The streams or the device on which one runner's calls run."""

    def __init__(self, where: str | None, device: torch.device) -> None:
        self._where = where if device.type == "cuda" else None
        self.device = device  # of all tensors
        if self._where == "second device" and torch.cuda.device_count() > 1:
            current = torch.cuda.current_device()
            self.device = torch.device("cuda", (current + 1) % torch.cuda.device_count())
        self._streams = [torch.cuda.Stream(self.device) for _ in range(STREAMS.get(self._where or "", 0))]

    @contextlib.contextmanager
    def current(self, call: int) -> Iterator[None]:
        """Makes the stream or device of a call current for the block."""
        with contextlib.ExitStack() as stack:
            if self._where == "device":
                stack.enter_context(torch.cuda.device(torch.cuda.current_device()))
            elif self._streams:
                stream, before = self._streams[call % len(self._streams)], torch.cuda.current_stream(self.device)
                stream.wait_stream(before)
                stack.callback(before.wait_stream, stream)
                stack.enter_context(torch.cuda.stream(stream))
            yield


class Reader:
    """Reads tensors on a stream of its own, where they are recorded so that the program may drop them."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._device = device
        self._read: list[torch.Tensor] = []

    def read(self, tensors: Sequence[torch.Tensor]) -> None:
        """Queues the reading, after a delay."""
        if self._stream is None:
            self._read = [t.detach().clone() for t in tensors]
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            torch.cuda._sleep(DELAY)
            self._read = [t.detach().clone() for t in tensors]
        for tensor in (t for t in tensors if t.is_cuda):  # with a bit set, torch frees a copy twice
            plain = torch._neg_view(tensor) if tensor.is_neg() else tensor.conj() if tensor.is_conj() else tensor
            plain.record_stream(self._stream)

    def taken(self) -> Sequence[torch.Tensor]:
        """The values that were read since the last time."""
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
        read, self._read = self._read, []
        return read


@contextlib.contextmanager
def own_trees(device: torch.device) -> Iterator[None]:
    """Trees for the current thread, if torch allows them for a plain thread."""
    with contextlib.ExitStack() as stack:
        if device.type == "cuda" and has_trees_per_thread():
            trees = Trees()
            stack.enter_context(trees.active())
            stack.callback(trees.clear)
        yield
