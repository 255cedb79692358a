"""Clocks of a GPU: the time between two places in its current stream.

Nothing here waits for the GPU. A :class:`TimedCall` is complete on the host when the call returns; its GPU time is read
later, when the GPU has reached the end mark.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pygraph_trees.cuda import progress


class CudaDevice:
    """The CUDA device with this index, and its current stream."""

    def __init__(self, index: int) -> None:
        import torch

        self._cuda, self._index = torch.cuda, index

    def is_idle(self) -> bool:
        """Whether the GPU has finished the stream's work."""
        return progress.is_over(self._cuda.current_stream(self._index))

    def mark(self) -> Any:
        """Marks a place in the stream."""
        event = self._cuda.Event(enable_timing=True)
        event.record(self._cuda.current_stream(self._index))
        return event

    def us_between(self, begin: Any, end: Any) -> float | None:
        """GPU time between two marks; None if the GPU has not reached the second one."""
        return progress.us_between(begin, end)


@dataclass(frozen=True, slots=True)
class TimedCall:
    """A call whose GPU work may still be running."""

    was_idle: bool  # whether the GPU was idle before the call
    host_us: float
    begin: Any  # marks in the stream
    end: Any  # None for a graphed call that was no plain replay

    def gpu_us(self, device: CudaDevice) -> float | None:
        """None if the GPU has not finished the call."""
        return device.us_between(self.begin, self.end)
