"""The program's own captures: graphs that the program captures, and calls of compiled functions in them.

Such a call runs un-graphed, as compiled code without CUDA graphs does: it touches neither recordings nor their memory,
and does not count as a warm-up or for a trial. The graph that the program captures holds the addresses of what it
reads. Outputs in the graph pool are therefore moved out before the capture begins.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import torch

from . import pools

_log = logging.getLogger("pygraph_trees.trees")

CAPTURED = "the program captured it in a graph of its own"


def is_captured() -> bool:
    """Whether the program captures the current stream in a graph of its own."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def capture_begin(upstream: Callable[..., None]) -> Callable[..., None]:
    """Also ends the open paths as a new step does, which moves their outputs; recordings capture without that."""

    @functools.wraps(upstream)
    def capture_begin(self: Any, *args: Any, **kwargs: Any) -> None:
        if (args[0] if args else kwargs.get("pool")) not in pools.OWNED:
            for manager in pools.managers():
                try:
                    manager.end_step()
                except RuntimeError as error:  # no memory is free, or the GPU is lost
                    _log.warning("outputs that a graph of the program may read could not be kept: %s", error)
        upstream(self, *args, **kwargs)

    return capture_begin
