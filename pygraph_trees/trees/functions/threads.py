"""Which version of a function, and which trees, the calls of a thread use.

Since torch 2.13, each thread has its own trees: torch adds a function to those of each thread that calls it. Autograd
runs the backwards of all threads in one thread per device, where torch would keep using the trees of the first. Here,
each thread is marked when it gets trees. Autograd takes the mark along, so a backward is added to the trees of the
thread that began it. All of that goes when the thread ends.

Before, there are trees for one thread at a time. A thread that begins a step moves outputs, while another one's
backward could add to a gradient whose address it has read; and no thread can draw random numbers while another one
records. The first thread that calls a function on a device uses graphs, and others run un-graphed, until it ends,
resets the trees, or makes no calls for a second while others do: the thread that warmed up a server.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch._guards import CompileContext, compile_context
from torch._inductor import config

from pygraph_trees.native import binding
from pygraph_trees.report.naming import BACKWARD, FORWARD, INFERENCE

from ..pools import pools
from .dispatch import PER_THREAD, forget_replayers

if TYPE_CHECKING:
    from collections.abc import Callable

    from pygraph_trees.report.log import FunctionLog

    Call = Callable[[list[Any]], Any]

ELSEWHERE = "another thread uses CUDA graphs, which are for one thread before torch 2.13"
SHORT_LIVED = "the threads that call it end before they replay it"
MOST_ENDED = 8  # threads
IDLE_S = 1.0
_NAME = "pygraph_trees"  # of the mark; native/tree.cpp looks for it


class _Thread:
    """A thread with trees. Only the thread itself holds it; the mark is a weak reference."""

    def __init__(self, number: int) -> None:
        self.number = number  # as threading.get_ident gives it
        self.trains_ungraphed = False  # whether it has run a forward un-graphed because graphs are another thread's
        # If it uses graphs: its calls on the slow path, all calls that others have seen, and since when.
        self.slow_calls = 0
        self.seen: tuple[int, int] | None = None
        self.since = 0.0


_local = threading.local()
_homes: dict[int, weakref.ref[_Thread]] = {}  # by device, the thread that uses graphs, before torch 2.13


def stash(name: str, value: Any) -> None:
    """Lets autograd's threads find ``value``, which no other thread uses yet, in backwards that this thread begins."""
    before = sys.getrefcount(value)
    torch._C._stash_obj_in_tls(name, value)
    if sys.getrefcount(value) == before:  # torch 2.11 drops a reference that it has not taken
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))


def mark() -> _Thread | None:
    """The calling thread, which is marked from now on, or in a backward, the one that began it; None if unmarked."""
    if torch._C._current_graph_task_id() >= 0:
        found: _Thread | None = torch._C._get_obj_in_tls(_NAME)() if torch._C._is_key_in_tls(_NAME) else None
        return found
    thread: _Thread | None = getattr(_local, "thread", None)
    if thread is None:
        thread = _Thread(threading.get_ident())
        stash(_NAME, weakref.ref(thread))
        _local.thread = thread
    return thread


def is_home(device: int) -> bool:
    """Whether the calling thread may use a device's trees."""
    if PER_THREAD:
        return True
    thread, known = mark(), _homes.get(device)
    home = None if known is None else known()
    if known is None and thread is not None:
        home = _homes.setdefault(device, weakref.ref(thread))()  # another thread may have come first
    elif home is None and thread is not None:
        home = _move_in(device, thread)
    return thread is not None and thread is home


def leave() -> None:
    """Lets another thread use the graphs of the devices whose graphs this one has used."""
    thread = mark()
    for device, home in list(_homes.items()):
        if thread is not None and home() is thread:
            forget_replayers()
            del _homes[device]


def _move_in(device: int, thread: _Thread) -> _Thread:
    forget_replayers()  # in backwards, a new mark may have the address of the ended thread's
    thread.trains_ungraphed = False
    _homes[device] = weakref.ref(thread)
    return thread


def _takes_over(device: int) -> bool:
    """Whether the thread that used the device's graphs is idle, so that the calling thread uses them from now on.

    This ends the open path as if a step began, which moves outputs. The path must be one of inference: autograd could
    be adding to a gradient in it.
    """
    thread, home = mark(), _homes[device]()
    if thread is None or home is None:
        return False
    now, calls = time.monotonic(), (home.slow_calls, 0 if binding.extension is None else binding.extension.counts()[1])
    if home.seen != calls:
        home.seen, home.since = calls, now
    if now - home.since < IDLE_S:
        return False
    home.since = now  # if it cannot be, it is tried again after another second
    if not all(manager.end_step(if_inference=True) for manager in pools.managers() if manager.device_index == device):
        return False
    _move_in(device, thread)
    return True


def way_elsewhere(device: int, log: FunctionLog, ungraphed: Call, noted: Call) -> Callable[[], Call | None]:
    """Returns a function that gives the way of the calling thread's calls; None if they may be graphed.

    Args:
        noted: runs a backward un-graphed and tells the manager, which waits for it if its forward was graphed.
    """

    def way() -> Call | None:
        if is_home(device):
            thread = mark()
            if thread is not None:
                thread.slow_calls += 1
            return None
        if log.mode == INFERENCE and _takes_over(device):
            return None
        log.not_graphed(ELSEWHERE)
        return noted if _is_awaited(log.mode) else ungraphed

    return way


def _is_awaited(mode: str) -> bool:
    """Whether a call in this thread may be a backward whose forward was graphed."""
    thread = mark()
    if thread is not None and mode == FORWARD:
        thread.trains_ungraphed = True
    return mode == BACKWARD and (thread is None or not thread.trains_ungraphed)


def for_each_thread(make: Callable[[], Call], log: FunctionLog, ungraphed: Call) -> Call:
    """Makes calls with what ``make`` returns now, for the first thread, and later for each other one.

    If threads end before they replay a function, those that come later run it ``ungraphed``.
    """
    context, unused = CompileContext.try_get(), [make()]
    of_threads: weakref.WeakKeyDictionary[_Thread, Call] = weakref.WeakKeyDictionary()
    of_others: list[Call] = []
    ended: list[None] = []

    def made() -> Call:
        with contextlib.suppress(IndexError):
            return unused.pop()
        with compile_context(context), config.patch({"triton.cudagraph_trees": True}):
            return make()

    def call(inputs: list[Any]) -> Any:
        thread = mark()
        if thread is None:
            of_others.extend([] if of_others else [made()])
            return of_others[0](inputs)
        found = of_threads.get(thread)
        if found is None:
            if len(ended) >= MOST_ENDED and sum(recording.replays for recording in log.recordings) < len(ended):
                log.not_graphed(SHORT_LIVED)
                return ungraphed(inputs)
            weakref.finalize(thread, ended.append, None).atexit = False
            found = of_threads[thread] = made()
        return found(inputs)

    return call
