"""What a captured graph takes of the GPU, measured around single launches that somebody else makes.

A launch is between two events of the stream that it is launched on. Nobody waits for them: the time is asked for later.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch


class LaunchClock:
    """Of one ``torch.cuda.CUDAGraph``; one launch at a time."""

    def __init__(self, graph: Callable[[], Any], device: int) -> None:
        """``graph``: gives it, or None once it is gone, and does not keep it."""
        self._graph, self._device = graph, device
        self._events: tuple[Any, Any] | None = None
        self._is_timed = False

    def time_next(self) -> None:
        """Has the next launch timed, whoever calls ``replay``; what was timed before is forgotten."""
        graph = self._graph()
        self._is_timed = False
        if graph is not None:
            with contextlib.suppress(AttributeError, TypeError):  # of a class that does not allow it: it is not timed
                # In the place of its class's, and gone with the launch.
                graph.replay = functools.partial(self._replay, weakref.ref(graph))

    def took_us(self) -> float | None:
        """What the launch that was timed took, once; None where none was, or the GPU is not done with it."""
        if not self._is_timed or self._events is None:
            return None
        begin, end = self._events
        if not end.query():
            return None
        self._is_timed = False
        return float(begin.elapsed_time(end)) * 1e3

    def _replay(self, graph_of: Callable[[], Any]) -> None:
        """Launches, once, whatever becomes of the events."""
        graph = graph_of()
        vars(graph).pop("replay", None)
        events = None
        if not torch.cuda.is_current_stream_capturing():  # an event of a capture has no time
            with contextlib.suppress(RuntimeError):
                events = self._begun()
        graph.replay()
        if events is not None:
            with contextlib.suppress(RuntimeError):
                events[1].record(torch.cuda.current_stream(self._device))
                self._is_timed = True

    def _begun(self) -> tuple[Any, Any]:
        if self._events is None:
            self._events = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        self._events[0].record(torch.cuda.current_stream(self._device))
        return self._events
