"""Python's garbage collector, off for as long as a graph is captured or a function is warmed up.

What the collector frees may run code of the program: a finalizer that launches kernels would have them captured, and
memory that it allocates would come from the graph pool. :func:`paused` may be entered by several threads, and inside
of itself; the collector goes on with the last one that leaves, if it was on when the first one came.
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
    """No garbage is collected inside, but where the program asks for it."""
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
