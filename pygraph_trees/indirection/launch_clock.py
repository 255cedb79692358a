"""What a captured graph takes of the GPU, measured around single launches that somebody else makes.

A launch is between two events of the stream that it is launched on. Nobody waits for them: the time is asked for later.
"""

from __future__ import annotations

import contextlib
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
            with contextlib.suppress(AttributeError):  # of a class without a dictionary: it is not timed
                graph.replay = self._replay  # in the place of its class's, and gone with the launch

    def took_us(self) -> float | None:
        """What the launch that was timed took, once; None where none was, or the GPU is not done with it."""
        if not self._is_timed or self._events is None:
            return None
        begin, end = self._events
        if not end.query():
            return None
        self._is_timed = False
        return float(begin.elapsed_time(end)) * 1e3

    def _replay(self) -> None:
        graph = self._graph()
        del graph.replay
        if torch.cuda.is_current_stream_capturing():  # an event of a capture has no time
            graph.replay()
            return
        if self._events is None:
            self._events = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin, end = self._events
        stream = torch.cuda.current_stream(self._device)
        begin.record(stream)
        graph.replay()
        end.record(stream)
        self._is_timed = True
