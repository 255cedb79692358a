"""Whose captures there are, and the lock of torch's: torch's own since torch 2.13, ours before.

A wait for the device in one thread breaks a capture in another one. Torch holds its lock while it warms up and records,
which :func:`locked_by_torch` notes for the thread. :func:`idle_device` waits until no other thread does so.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import torch

from pygraph_trees.compat import has_capture_lock
from pygraph_trees.cuda.progress import capture_lock, wait_for_device
from pygraph_trees.errors import PygraphError

from .collector import paused
from .interrupts import deferred

IS_TORCHS = has_capture_lock()


class DeviceBusy(PygraphError, RuntimeError):
    template = "the GPU cannot be waited for while a thread captures a graph"


class _Thread(threading.local):
    is_locked = False  # by this thread, which must then not wait for the lock


_thread = _Thread()


@contextlib.contextmanager
def locked_by_torch() -> Iterator[None]:
    """Wraps what torch does under its lock, and captures of its own; before torch 2.13, holds the lock."""
    if _thread.is_locked:
        yield
        return
    with contextlib.nullcontext() if IS_TORCHS else capture_lock():
        _thread.is_locked = True
        try:
            yield
        finally:
            _thread.is_locked = False


def is_by_torch() -> bool:
    """Whether a capture of this thread is one of torch's, or of a new manager."""
    return _thread.is_locked


def is_captured() -> bool:
    """Whether the program captures the current stream in a graph of its own; such calls run un-graphed."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


@contextlib.contextmanager
def idle_device(index: int) -> Iterator[None]:
    """Waits for a device before and after what is inside; no other thread captures for torch meanwhile."""
    with deferred(), contextlib.ExitStack() as stack:  # an interrupt could leave a lock held
        if not _thread.is_locked:
            stack.enter_context(paused())  # a finalizer could wait for the lock
            if IS_TORCHS:
                stack.enter_context(capture_lock())
            stack.enter_context(locked_by_torch())
        wait(index)
        yield
        wait_for_device(index)


def wait(index: int) -> None:
    """Waits for a device; raises :class:`DeviceBusy` if that is impossible."""
    if not wait_for_device(index):
        raise DeviceBusy
