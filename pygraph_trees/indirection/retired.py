"""Memory of recordings whose graph is gone: placeholders with memory of their own, and tables.

Queued launches may still use it. :func:`retire` is called by finalizers, which the garbage collector runs anywhere, so
it waits for nothing: memory whose last launches are known to be over (:class:`LastLaunches`) is given back at once, the
rest where :func:`release_retired` may wait for the GPU. That is where a function is recorded or warmed up, where
recordings are given up, and in ``torch._dynamo.reset()``. The launches of a graph with a table alone are not followed,
since nothing in Python is done at them.
"""

from __future__ import annotations

import contextlib
import logging
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch._inductor import cudagraph_trees

from pygraph_trees.compat import has_capture_lock
from pygraph_trees.errors import DriverError

if TYPE_CHECKING:
    from pygraph_trees.cuda.driver import Driver

_log = logging.getLogger("pygraph_trees.indirection")

_MOST_STREAMS = 64


class Memory(Protocol):
    def close(self) -> None:
        """Gives it back; called again, it goes on where it was interrupted."""


class LastLaunches:
    """The launches of one graph after which something is done: whether the last ones, on any stream, are over."""

    def __init__(self) -> None:
        self._events: dict[int, Any] = {}  # by stream
        self._is_known = False  # not before the first launch, nor while one is made ready
        self._are_too_many = False  # streams

    def begin(self) -> None:
        """Work of a launch is queued from now on."""
        self._is_known = False

    def end(self, device: int) -> None:
        """All work of a launch is queued, on the current stream."""
        stream = torch.cuda.current_stream(device)
        event = self._events.get(stream.cuda_stream)
        if event is None:
            if len(self._events) == _MOST_STREAMS:
                self._are_too_many = True
                return
            event = self._events[stream.cuda_stream] = torch.cuda.Event()
        event.record(stream)
        self._is_known = True

    def are_over(self) -> bool:
        return self._is_known and not self._are_too_many and all(event.query() for event in self._events.values())


@dataclass(frozen=True, slots=True, eq=False)
class _Retired:
    driver: Driver
    device: int
    memory: Memory
    launches: LastLaunches | None

    def close_if_idle(self) -> bool:
        """Gives it back if no launch uses it any longer, as far as that is known without waiting."""
        if self.launches is None:
            return False
        try:
            with self.driver.without_disturbing_captures():
                is_idle = self.launches.are_over()
                if is_idle:
                    give_back(self.memory.close)
        except (RuntimeError, DriverError):  # a launch was captured by somebody; the GPU is lost; a call is not there
            return False
        return is_idle


# No lock: a finalizer that the garbage collector runs may come while the same thread holds it.
_retired: deque[_Retired] = deque()


def retire(driver: Driver, device: int, memory: Memory, launches: LastLaunches | None = None) -> None:
    """Gives memory back as soon as that needs no waiting. May be called anywhere.

    Args:
        launches: those that use the memory; None where they are not known.
    """
    _retired.append(_Retired(driver, device, memory, launches))
    if launches is not None and not _is_capturing():
        _give_back_idle()


def release_retired(*, is_locked: bool = False) -> None:
    """Gives back all, and waits for the GPU where that is necessary.

    A wait for the whole device by another thread breaks a capture. While somebody else holds torch's lock of captures,
    memory that would have to be waited for stays retired.

    Args:
        is_locked: whether this thread holds it.
    """
    if not _retired or _is_capturing():
        return
    _give_back_idle()
    if not _retired:
        return
    with _lock_of_captures(is_locked) as is_ours:
        gone = _taken() if is_ours else []
        try:
            for device in {retired.device for retired in gone}:
                torch.cuda.synchronize(device)
            while gone:
                give_back(gone[-1].memory.close)
                gone.pop()
        except BaseException:
            _retired.extend(gone)  # an interrupt: the next one gives them back
            raise


def _is_capturing() -> bool:
    """Whether this thread captures, or the GPU is lost."""
    try:
        return torch.cuda.is_current_stream_capturing()
    except RuntimeError:
        return True


@contextlib.contextmanager
def _lock_of_captures(is_locked: bool) -> Iterator[bool]:
    """Holds the lock meanwhile, if torch has one and it can be had without waiting."""
    if is_locked or not has_capture_lock():
        yield True
        return
    lock = cudagraph_trees.graph_capture_lock
    is_ours = lock.acquire(blocking=False)
    try:
        yield is_ours
    finally:
        if is_ours:
            lock.release()


def _give_back_idle() -> None:
    gone = _taken()
    try:
        for retired in tuple(gone):
            if retired.close_if_idle():
                gone.remove(retired)
    finally:
        _retired.extend(gone)


def _taken() -> list[_Retired]:
    """All that are retired now; a finalizer may come in between and retire more."""
    gone: list[_Retired] = []
    with contextlib.suppress(IndexError):
        while True:
            gone.append(_retired.popleft())
    return gone


def give_back(call: Callable[[], None]) -> None:
    """What the driver does not take back is lost; that is no reason to lose a call."""
    try:
        call()
    except DriverError as error:
        _log.warning("placeholder addresses could not be given back: %s", error)
