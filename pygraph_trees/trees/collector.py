"""Turns Python's garbage collector off while a graph is captured or a function is warmed up.

The collector may run finalizers of the program. Kernels that a finalizer launches would be captured, and memory that it
allocates would come from the graph pool. :func:`paused` may be nested and entered by several threads. When the last one
leaves, the collector is turned on again if it was on when the first one entered.
"""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator

_lock = threading.Lock()
_inside = 0
_was_on = False


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """Inside, no garbage is collected unless the program calls the collector."""
    global _inside, _was_on
    with _lock:
        if _inside == 0:
            _was_on = gc.isenabled()
            gc.disable()
        _inside += 1
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            if _inside == 0 and _was_on:
                gc.enable()
