"""Asks how far the GPU has come, or waits for it, without breaking a capture of another thread.

While a thread captures in CUDA's global mode, which is the default of ``torch.cuda.graph``, such a question or wait of
any thread is an error and ends the capture.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch

from pygraph_trees.compat import has_capture_lock
from pygraph_trees.errors import DriverError

from .driver import driver

_own_lock = threading.RLock()


def capture_lock() -> Any:
    """The lock that is held while torch warms up and records: torch's since torch 2.13, before that our own."""
    if not has_capture_lock():
        return _own_lock
    from torch._inductor import cudagraph_trees

    return cudagraph_trees.graph_capture_lock


class CudaDevice:
    """The CUDA device with this index, and its current stream."""

    def __init__(self, index: int) -> None:
        self._index = index

    def is_idle(self) -> bool:
        """Whether the GPU has finished the stream's work; raises RuntimeError if the stream captures."""
        with without_disturbing_captures():
            return bool(torch.cuda.current_stream(self._index).query())

    def mark(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._index))
        return event

    @staticmethod
    def us_between(begin: Any, end: Any) -> float | None:
        """GPU time between two marks; None if the GPU has not reached the second one."""
        with without_disturbing_captures():
            return begin.elapsed_time(end) * 1e3 if end.query() else None


def wait_for_device(index: int) -> bool:
    """Waits until the GPU has finished the work of all streams; returns False if CUDA refuses to, during a capture."""
    if torch.cuda.is_initialized():
        try:
            with without_disturbing_captures():
                torch.cuda.synchronize(index)
        except RuntimeError:
            return False
    return True


@contextlib.contextmanager
def without_disturbing_captures() -> Iterator[None]:
    """Wraps questions and waits of this thread; see :meth:`.Driver.without_disturbing_captures`."""
    with contextlib.ExitStack() as stack:
        if (found := driver()) is not None:
            with contextlib.suppress(DriverError):  # the driver lacks the call
                stack.enter_context(found.without_disturbing_captures())
        yield
