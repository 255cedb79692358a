"""Torch's version of a function for each thread with trees of its own, since torch 2.13.

Torch adds a function to the trees of a thread when that thread calls it first. Autograd runs the backwards of all
threads in one thread per device, where torch would keep using the trees of the first. Here, each thread is marked when
it gets trees. Autograd takes the mark along, so a backward is added to the trees of the thread that began it. All of
that goes when the thread ends.
"""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch._guards import CompileContext, compile_context

from .dispatch import PER_THREAD

if TYPE_CHECKING:
    from collections.abc import Callable

    Call = Callable[[list[Any]], Any]

_NAME = "pygraph_trees"  # of the mark; native/tree.cpp looks for it


class _Thread:
    """A thread with trees. Only the thread itself holds it; the mark is a weak reference."""


_local = threading.local()


def mark() -> None:
    """Marks the calling thread, unless autograd runs a backward in it."""
    if PER_THREAD and not hasattr(_local, "thread") and torch._C._current_graph_task_id() < 0:
        thread = _Thread()
        torch._C._stash_obj_in_tls(_NAME, weakref.ref(thread))
        _local.thread = thread


def for_each_thread(make: Callable[[], Call]) -> Call:
    """What ``make`` returns, which it may be asked for again, as in this compilation, for the backwards of a thread."""
    run = make()
    if not PER_THREAD:
        return run
    context = CompileContext.try_get()
    of_backwards: weakref.WeakKeyDictionary[_Thread, Call] = weakref.WeakKeyDictionary()

    def call(inputs: list[Any]) -> Any:
        thread = _thread_of_backward()
        if thread is None:
            return run(inputs)
        found = of_backwards.get(thread)
        if found is None:
            with compile_context(context):
                found = of_backwards[thread] = make()
        return found(inputs)

    return call


def _thread_of_backward() -> _Thread | None:
    """The thread that began the backward that runs here; None without a backward, or if that thread has no mark."""
    if torch._C._current_graph_task_id() < 0 or not torch._C._is_key_in_tls(_NAME):
        return None
    found: _Thread | None = torch._C._get_obj_in_tls(_NAME)()
    return found
