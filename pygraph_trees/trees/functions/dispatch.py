"""The way that a function's calls go, and the managers that may replay them on the fast path.

Each thread adds a function to its own manager, so a :class:`Dispatch` has a replayer for each thread. Torch treats a
function of integers as a separate function for each set of their values, so each set has its own dispatch and entry.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Mapping
from typing import Any

from pygraph_trees.compat import has_trees_per_thread
from pygraph_trees.native import binding

from .fast_path import Call, FunctionState, Replayer, entry

PER_THREAD = has_trees_per_thread()
_known: weakref.WeakSet[Dispatch] = weakref.WeakSet()


class Dispatch(FunctionState):
    """The state of one function. ``call`` makes its calls; if it is None, they are replayed, or upstream makes them."""

    __slots__ = ("__dict__", "__weakref__", "call", "unchecked")  # slots for what each call reads
    is_replayed: bool  # whether calls may be replayed now
    was_asked: bool  # whether this call's caller has tried a fast replay without success
    slow: tuple[Any, ...]  # counters of the calls that took the slow path, in the order of ``SLOW_CALLS``
    replayer: Any  # the one used last; None if there is none
    replayers: dict[int, Any]  # by thread
    integers: tuple[int, ...]  # the indices of its integers, once it is added with integers
    by_values: dict[tuple[int, ...], Call | None]  # by their values, the entry of the function with these values

    def __init__(self, slow: tuple[Any, ...] = ()) -> None:
        self.slow, self.was_asked = slow, False
        self.replayer, self.replayers = None, {}
        self.is_added = False  # to a manager
        self._with_values: dict[tuple[int, ...], Dispatch] = {}
        # By manager: by id, the dispatch of the function with some values.
        self._by_id: weakref.WeakKeyDictionary[Any, dict[Any, Dispatch]] = weakref.WeakKeyDictionary()
        self.go()
        _known.add(self)

    def go(self, call: Call | None = None, *, is_graphed: bool = True, needs_checks: bool = True) -> None:
        """Lets the next calls go another way.

        ``is_graphed``: whether ``call`` may use graphs, as a trial does. ``needs_checks``: whether it matters to
        ``call`` if the program captures the calls or has a memory pool around them.
        """
        self.unchecked = None if needs_checks else call
        self.is_graphed, self.call = is_graphed, call
        self.is_replayed = call is None

    def replay(self, fast_call: Call, inputs: list[Any]) -> Any:
        """Makes a fast replay, whatever the way; returns None if that is not possible."""
        self.is_replayed = True
        try:
            return fast_call(inputs)
        finally:
            self.is_replayed = self.call is None

    def add(self, manager: Any = None, function_id: Any = None, integers: Mapping[int, int] | None = None) -> None:
        """Notes that this thread added it to a manager: once, or once for each set of values of its integers.

        ``integers``: these values, by the index of each among the inputs.
        """
        self.is_added = True
        self._drop(_thread())
        if not integers:
            return
        self.integers, values = tuple(integers), tuple(integers.values())
        if not self._with_values:
            self.by_values = {}
        if (own := self._with_values.get(values)) is None:
            own = self._with_values[values] = Dispatch(self.slow)
            self.by_values[values] = entry(own)
        own.add()
        self._by_id.setdefault(manager, {})[function_id] = own

    def may_be_replayed_by(self, manager: Any, function_id: Any, own: Any = None) -> None:
        """Notes that this thread's ``manager`` has a recording with a fast path, and the own memory of its outputs."""
        if self._with_values:
            if (with_values := self._by_id.get(manager, {}).get(function_id)) is not None:
                with_values.may_be_replayed_by(manager, function_id, own)
            return
        if not self.is_added or Replayer is None:
            return
        thread = _thread()
        replayer = self.replayers.get(thread)
        if replayer is None or replayer.manager() is not manager:
            replayer, dispatch = Replayer(), weakref.ref(self)

            def drop(gone: weakref.ref[Any]) -> None:
                if (found := dispatch()) is not None:
                    found._drop(thread, gone)

            # A manager must not outlive its functions, nor a thread's memory the thread.
            replayer.manager, replayer.thread = weakref.ref(manager, drop), thread
        replayer.function_id, replayer.own = function_id, own
        self.replayers[thread] = self.replayer = replayer

    def _drop(self, thread: int, manager: Any = None) -> None:
        """Drops a thread's replayer, unless it has another ``manager``."""
        replayer = self.replayers.get(thread)
        if replayer is not None and (manager is None or replayer.manager is manager):
            del self.replayers[thread]
            if self.replayer is replayer:
                self.replayer = next(iter(list(self.replayers.values())), None)


def forget_replayers() -> None:
    """Lets the next call of each function take the slow path, in all threads."""
    known: list[Dispatch] | None = None
    while known is None:
        with contextlib.suppress(RuntimeError):  # another thread has just made one
            known = list(_known)
    for dispatch in known:
        dispatch.replayer, dispatch.replayers = None, {}


def _thread() -> int:
    return 0 if binding.extension is None else int(binding.extension.thread_of_trees())
