"""Locks for which nobody waits.

A finalizer may come anywhere, also while a lock is held, and call a function whose backward needs the lock in another
thread, for which the finalizer waits. A reentrant lock does not help.
"""

from __future__ import annotations

import contextlib
import operator
from collections import deque
from collections.abc import Callable
from typing import Any

_acquire = operator.methodcaller("acquire", blocking=False)
_release = operator.methodcaller("release")


def run_if_free(lock: Any, work: Callable[[], object]) -> bool:
    """Calls ``work`` with a lock held, if it is free; returns whether it was. Interrupts leave it released."""
    held: list[Any] = []
    try:
        held.extend(filter(_acquire, (lock,)))  # one step of the interpreter: an interrupt comes before or after it
        if held:
            work()
            return True
        return False
    finally:
        try:
            _release_all(held)
        except BaseException:
            _release_all(held)
            raise


def _release_all(held: list[Any]) -> None:
    with contextlib.suppress(IndexError):
        deque(map(_release, iter(held.pop, None)), 0)  # one step
