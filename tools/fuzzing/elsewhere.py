"""Other threads, streams and devices for a call.

:class:`Threads` runs work in the thread that a case names and waits for it. :class:`Elsewhere` makes a stream or a
device current, with the waits that a correct program has. Threads that make CUDA graphs have their own trees, cleared
before the thread ends. What they return must not be in a graph's memory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from pygraph_trees.trees.containers import Trees

T = TypeVar("T")


class Threads:
    """The threads of one runner."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._worker: ThreadPoolExecutor | None = None
        self._of_worker = contextlib.ExitStack()  # entered and left in the worker

    def new(self, work: Callable[[], T]) -> T:
        """The result of ``work`` in a new thread, which then ends; raises what ``work`` raises."""

        def inside() -> T:
            with _own_trees(self._device):
                return work()

        with ThreadPoolExecutor(1) as pool:
            return pool.submit(inside).result()

    def worker(self, work: Callable[[], T]) -> T:
        """The result of ``work`` in the thread that lives until :meth:`close`; raises what ``work`` raises."""
        if self._worker is None:
            self._worker = ThreadPoolExecutor(1)
            self._worker.submit(self._of_worker.enter_context, _own_trees(self._device)).result()
        return self._worker.submit(work).result()

    def close(self) -> None:
        if self._worker is not None:
            self._worker.submit(self._of_worker.close).result()
            self._worker.shutdown()
            self._worker = None


class Elsewhere:
    """The stream or the device on which one runner's calls run."""

    def __init__(self, where: str | None, device: torch.device) -> None:
        self._where = where if device.type == "cuda" else None
        self.device = device  # of all tensors
        if self._where == "second device" and torch.cuda.device_count() > 1:
            current = torch.cuda.current_device()
            self.device = torch.device("cuda", (current + 1) % torch.cuda.device_count())
        self._stream = torch.cuda.Stream(self.device) if self._where == "stream" else None

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        """Makes the stream or device current for the block."""
        if self._where == "device":
            with torch.cuda.device(torch.cuda.current_device()):
                yield
        elif self._stream is not None:
            before = torch.cuda.current_stream(self.device)
            self._stream.wait_stream(before)
            try:
                with torch.cuda.stream(self._stream):
                    yield
            finally:
                before.wait_stream(self._stream)
        else:
            yield


@contextlib.contextmanager
def _own_trees(device: torch.device) -> Iterator[None]:
    """Trees for the current thread, if torch allows them for a plain thread: since 2.13."""
    if device.type != "cuda" or not _may_have_trees():
        yield
        return
    trees = Trees()
    with trees.active():
        try:
            yield
        finally:
            trees.clear()


def _may_have_trees() -> bool:
    from torch._inductor import cudagraph_trees

    try:
        cudagraph_trees.get_obj(cudagraph_trees.local, "tree_manager_containers")
    except AssertionError:
        return False
    return True
