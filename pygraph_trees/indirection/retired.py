"""Memory of recordings whose graph is gone: materialised placeholders, and tables. Queued launches may still use it.

Finalizers call :func:`retire`, which never waits: it gives memory back if the last launches (:class:`LastLaunches`) are
known to be over. The rest waits for :func:`release_retired`, when a function is recorded or warmed up, recordings are
given up, or torch is reset. A graph that has only a table is launched without Python: its launches are not tracked.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from pygraph_trees.cuda.progress import capture_lock
from pygraph_trees.errors import DriverError
from pygraph_trees.locks import run_if_free

if TYPE_CHECKING:
    from pygraph_trees.cuda.driver import Driver

_log = logging.getLogger("pygraph_trees.indirection")

_MOST_STREAMS = 64


class LastLaunches:
    """Whether the last launches of one graph, on all streams, are over."""

    def __init__(self) -> None:
        self._events: dict[int, Any] = {}  # by stream
        self._is_known = False  # false before the first launch, and while a launch is prepared
        self._are_too_many = False  # more streams than are followed

    def begin(self) -> None:
        """Call before any work of a launch is queued."""
        self._is_known = False

    def end(self, device: int) -> None:
        """Call when all work of a launch is queued on the current stream."""
        stream = torch.cuda.current_stream(device)
        if (event := self._events.get(stream.cuda_stream)) is None:
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
    memory: Any  # its ``close`` gives it back; after an interrupt, the next call continues
    launches: LastLaunches | None

    def close_if_idle(self) -> bool:
        """Gives the memory back if it is known without waiting that no launch uses it."""
        if self.launches is None:
            return False
        try:
            with self.driver.without_disturbing_captures():
                is_idle = self.launches.are_over()
                if is_idle:
                    give_back(self.memory.close)
        except (RuntimeError, DriverError):  # other code captured a launch; the GPU is lost; a call is missing
            return False
        return is_idle


# No lock: the garbage collector may run a finalizer while the same thread holds it.
_retired: deque[_Retired] = deque()


def retire(driver: Driver, device: int, memory: Any, launches: LastLaunches | None = None) -> None:
    """Gives memory back as soon as that needs no waiting, if the ``launches`` that use it are known. Never waits."""
    _retired.append(_Retired(driver, device, memory, launches))
    if launches is not None and not _is_capturing():
        _give_back()


def release_retired(*, is_locked: bool = False) -> None:
    """Gives back all retired memory, and waits for the GPU if necessary.

    A wait for the whole device breaks another thread's capture. Memory for which a wait is necessary stays retired
    unless this thread holds the capture lock (``is_locked``) or no thread does.
    """
    if not _retired or _is_capturing():
        return
    _give_back()
    if _retired and is_locked:
        _give_back(waits=True)
    elif _retired:
        run_if_free(capture_lock(), functools.partial(_give_back, waits=True))


def _is_capturing() -> bool:
    """Whether this thread captures a graph; also true if the GPU is lost."""
    with contextlib.suppress(RuntimeError):
        return torch.cuda.is_current_stream_capturing()
    return True


def _give_back(*, waits: bool = False) -> None:
    """Gives back what is retired now: everything if it ``waits`` for the GPU, else what no launch is known to use."""
    gone: list[_Retired] = []
    try:
        with contextlib.suppress(IndexError):
            while True:
                gone.append(_retired.popleft())
        for device in {retired.device for retired in gone} if waits else ():
            torch.cuda.synchronize(device)
        for retired in tuple(gone):
            if waits:
                give_back(retired.memory.close)
            if waits or retired.close_if_idle():
                gone.remove(retired)
    finally:
        _retired.extend(gone)  # after an interrupt, the next call gives these back


def give_back(call: Callable[[], None]) -> None:
    """Calls the driver to take something back. A refusal is logged, and does not fail the program's call."""
    try:
        call()
    except DriverError as error:
        _log.warning("placeholder addresses could not be given back: %s", error)
