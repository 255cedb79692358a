"""Turns Python's garbage collector off while a graph is captured or a function is warmed up.

A collection may run finalizers of the program, whose kernels would be captured and whose memory would come from the
graph pool. :func:`paused` may be nested and entered by several threads, and fast replays count too. When the last one
leaves, the collector is on again if it was on before. A forked process, which lacks the threads, restarts the count.
"""

from __future__ import annotations

import contextlib
import gc
import os
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
        is_last = is_counted[0] and _inside == 1
        _inside -= is_counted[0] and _inside > 0  # 0 if this process was forked inside
        if is_last and _was_on:
            gc.enable()


def _forked() -> None:
    """Makes the count 0, and turns the collector on if it was off for the count."""
    global _inside, _lock
    _lock = threading.RLock()
    if _inside and _was_on:
        gc.enable()
    _inside = 0
    if binding.extension is not None:
        binding.extension.collector_forked()


os.register_at_fork(after_in_child=_forked)
