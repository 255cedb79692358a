"""Marks threads, and keeps a version of each function for each of them.

Since torch 2.13, each thread has its own trees. Autograd runs the backwards of all threads in one thread per device,
where torch would keep using the trees of the first. Here, each thread is marked when it gets trees. Autograd takes the
mark along, so a backward is added to the trees of the thread that began it. All of that goes when the thread ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch._guards import CompileContext, compile_context
from torch._inductor import config

from pygraph_trees.reasons import Reason

if TYPE_CHECKING:
    from pygraph_trees.report.log import FunctionLog

    from .fast_path import Call

MOST_ENDED = 8  # threads
MOST_REFUSED = 16  # calls of a later thread; one that goes on calling is not short-lived
_NAME = "pygraph_trees"  # of the mark; native/tree.cpp looks for it


class Thread:
    """A thread with trees. Only the thread itself holds it; the mark is a weak reference."""

    def __init__(self, number: int) -> None:
        self.number = number  # as threading.get_ident gives it
        self.trains_ungraphed = False  # whether it has run a forward un-graphed because graphs are another thread's


_local = threading.local()


def stash(name: str, value: Any) -> None:
    """Lets autograd's threads find ``value``, which no other thread uses yet, in backwards that this thread begins."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))  # first: an interrupt may come anywhere
    before = sys.getrefcount(value)
    torch._C._stash_obj_in_tls(name, value)
    if sys.getrefcount(value) != before:  # torch took its own; torch 2.11 takes none, but releases one later
        ctypes.pythonapi.Py_DecRef(ctypes.py_object(value))


def mark() -> Thread | None:
    """The calling thread, which is marked from now on, or in a backward, the one that began it; None if unmarked."""
    if torch._C._current_graph_task_id() >= 0:
        return torch._C._get_obj_in_tls(_NAME)() if torch._C._is_key_in_tls(_NAME) else None
    thread: Thread | None = getattr(_local, "thread", None)
    if thread is None:
        thread = Thread(threading.get_ident())
        stash(_NAME, weakref.ref(thread))
        _local.thread = thread
    return thread


def for_each_thread(make: Callable[[], Call], log: FunctionLog, ungraphed: Call) -> Call:
    """Makes calls with what ``make`` returns now, for the first thread, and later for each other one.

    If threads end before they replay a function, those that come later first run it ``ungraphed`` a few times.
    """
    context, unused = CompileContext.try_get(), [make()]
    of_threads: weakref.WeakKeyDictionary[Thread, Call] = weakref.WeakKeyDictionary()
    of_others: list[Call] = []
    ended: list[None] = []
    refused: weakref.WeakKeyDictionary[Thread, int] = weakref.WeakKeyDictionary()  # calls

    def made() -> Call:
        with contextlib.suppress(IndexError):
            return unused.pop()
        with compile_context(context), config.patch({"triton.cudagraph_trees": True}):
            return make()

    def call(inputs: list[Any]) -> Any:
        if (thread := mark()) is None:
            of_others.extend([] if of_others else [made()])
            return of_others[0](inputs)
        if (found := of_threads.get(thread)) is None:
            are_short = len(ended) >= MOST_ENDED and sum(record.replays for record in log.recordings) < len(ended)
            if are_short and (calls := refused.get(thread, 0)) < MOST_REFUSED:
                refused[thread] = calls + 1
                log.not_graphed(Reason.SHORT_LIVED())
                return ungraphed(inputs)
            weakref.finalize(thread, ended.append, None).atexit = False
            found = of_threads[thread] = made()
        return found(inputs)

    return call
