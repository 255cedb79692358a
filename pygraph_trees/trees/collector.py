"""Turns Python's garbage collector off while a graph is captured or a function is warmed up.

The collector may run finalizers of the program. Kernels that a finalizer launches would be captured, and memory that it
allocates would come from the graph pool. :func:`paused` may be nested and entered by several threads. When the last one
leaves, the collector is turned on again if it was on when the first one entered. Fast replays are counted too.
"""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator

from pygraph_trees.native import binding

_lock = threading.RLock()  # turning the collector on may run a finalizer that comes here, under the lock
_inside = 0
_was_on = False


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """Inside, no garbage is collected unless the program calls the collector."""
    cpp = binding.extension
    off, on = (_off, _on) if cpp is None else (cpp.collector_off, cpp.collector_on)
    is_counted = [False]  # set in one step with the count: an interrupt may come anywhere
    try:
        off(is_counted)
        yield
    finally:
        on(is_counted)


def _off(is_counted: list[bool]) -> None:
    global _inside, _was_on
    with _lock:
        _inside += 1
        is_counted[0] = True
        if _inside == 1:
            _was_on = gc.isenabled()
            gc.disable()


def _on(is_counted: list[bool]) -> None:
    global _inside
    with _lock:
        _inside -= is_counted[0]
        if is_counted[0] and _inside == 0 and _was_on:
            gc.enable()
