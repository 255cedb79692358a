"""The program's own captures: graphs that the program captures, and calls of compiled functions in them.

Such a call runs un-graphed: it touches neither recordings nor their memory, and does not count as a warm-up or for a
trial. Since the program's graph holds the addresses of what it reads, outputs are moved out of the pool before.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable
from typing import Any

import torch

from ..pools import pools
from ..pools.capture_lock import is_by_torch
from .containment import described
from .dispatch import PER_THREAD
from .home import is_used_elsewhere

_log = logging.getLogger("pygraph_trees.trees")


def is_captured() -> bool:
    """Whether the program captures the current stream in a graph of its own."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def _end_step(manager: Any) -> None:
    try:
        why: object = None if manager.end_step() else "another call is under way"
    except Exception as error:  # for example, no memory is free
        why = described(error)
    if why is not None:
        _log.warning("outputs that a graph of the program may read could not be kept: %s", why)


def capture_begin(upstream: Callable[..., None]) -> Callable[..., None]:
    """Also ends the open paths of the thread as a new step does, which moves their outputs.

    Captures of recordings, and those with which torch makes a manager, do not.
    """

    @functools.wraps(upstream)
    def capture_begin(self: Any, *args: Any, **kwargs: Any) -> None:
        pool = args[0] if args else kwargs.get("pool")
        if pool not in pools.OWNED and not is_by_torch():
            for manager in pools.managers():
                thread, device = manager.thread, manager.device_index
                if thread in (None, threading.get_ident()) if PER_THREAD else not is_used_elsewhere(device):
                    _end_step(manager)
        upstream(self, *args, **kwargs)

    return capture_begin
