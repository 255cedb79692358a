"""Defers interrupts while the trees change, so that no change is left half made.

Inside :func:`deferred`, the main thread's handler of SIGINT only notes the signal; the program's handler is called at
the end. A second signal after :data:`PATIENCE_S` is not deferred: the first call of a function may compile for minutes.
The frame in which a signal came is not kept: its locals would stay alive, and with them memory of the graph pool.
Handlers of other signals may raise anywhere: ``functions/containment.py`` then cleans up after torch.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

PATIENCE_S = 2.0


@contextlib.contextmanager
def deferred() -> Iterator[None]:
    """Inside, SIGINT does not interrupt the main thread; other threads never get signals in Python."""
    is_main = threading.get_ident() == threading.main_thread().ident
    handler = signal.getsignal(signal.SIGINT) if is_main else None
    if not callable(handler):  # another thread's, ignored, or not Python's
        yield
        return
    came: list[float] = []
    is_over = False

    def note(number: int, frame: Any) -> None:
        if is_over:  # the program saved this handler and restored it later
            return handler(number, frame)
        came.append(time.monotonic())
        if came[-1] - came[0] > PATIENCE_S:
            del came[:]
            handler(number, frame)

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        is_over = True
        if signal.getsignal(signal.SIGINT) is note:  # the program may have set another
            signal.signal(signal.SIGINT, handler)
        if came:
            handler(signal.SIGINT, sys._getframe())
