"""The way that a function's calls go, and the manager that may replay them on the fast path.

A function has a :class:`Dispatch`; a trial changes its :class:`Way`. C++ reads the manager, the function's id, the
memory of its outputs and the thread. Torch treats a function of integers as a separate function for each set of their
values, so each set has its own dispatch and entry.
"""

from __future__ import annotations

import enum
import weakref
from typing import TYPE_CHECKING, Any

from pygraph_trees.compat import has_trees_per_thread
from pygraph_trees.native import binding

from .fast_path import FunctionState, entry

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    Call = Callable[[list[Any]], Any]

PER_THREAD = has_trees_per_thread()


class Way(enum.Enum):
    """The way of a function's next calls."""

    REPLAYED = enum.auto()  # on the fast path if that is possible, otherwise by upstream's code
    MEASURED = enum.auto()  # as the trial decides for each call
    FIRST_GRAPHED = enum.auto()  # graphed, but not yet known to a manager
    UNGRAPHED = enum.auto()


def _nobody() -> None:
    return None


class Dispatch(FunctionState):
    """The state of one function. ``call`` makes its calls unless the way is ``REPLAYED``."""

    __slots__ = ("__dict__", "__weakref__", "call")  # a slot for the attribute that each call reads
    manager: Callable[[], Any]  # the manager that may replay the function now, or None
    was_asked: bool  # whether this call's caller has tried a fast replay without success
    own: Any  # the ``OwnMemory`` of the function in C++; None without any
    slow: tuple[Any, ...]  # counters of the calls that took the slow path, in the order of ``SLOW_CALLS``
    thread: int  # the only thread that may replay it, if each thread has its own trees; 0 otherwise
    integers: tuple[int, ...]  # the indices of its integers, once it is added with integers
    by_values: dict[tuple[int, ...], Call | None]  # by their values, the entry of the function with these values

    def __init__(self, slow: tuple[Any, ...] = ()) -> None:
        self.slow = slow
        self.way = Way.REPLAYED
        self.call: Call | None = None
        self.manager, self.function_id = _nobody, None
        self.thread, self.was_asked, self.own = 0, False, None
        # The manager that may replay it, if the way allows that. A manager must not outlive its functions.
        self.replayer: Callable[[], Any] = _nobody
        self._added = 0
        self._of_integers = False
        self._with_values: dict[tuple[int, ...], Dispatch] = {}
        self._by_id: dict[Any, Dispatch] = {}

    def go(self, way: Way, call: Call | None = None) -> None:
        """Lets the next calls go another way; ``call`` makes them, or None if they are replayed."""
        self.way, self.call = way, call
        self._update()

    def replay(self, fast_call: Call, inputs: list[Any]) -> Any:
        """Makes a fast replay, whatever the way; returns None if that is not possible."""
        self.manager = self.replayer
        try:
            return fast_call(inputs)
        finally:
            self._update()

    def _update(self) -> None:
        self.manager = self.replayer if self.way is Way.REPLAYED else _nobody

    def add(self, *, of_integers: bool) -> None:
        """Notes that it was added to a manager: once, or once for each set of values if it takes integers."""
        self._added += 1
        self._of_integers |= of_integers
        self.replayer = _nobody
        self._update()

    @property
    def is_added(self) -> bool:
        """Whether it was added to a manager."""
        return self._added > 0

    def add_values(self, function_id: Any, integers: Mapping[int, int]) -> None:
        """Notes that it was added with these values of its integers, by the index of each among the inputs.

        The manager treats it as a separate function for each set of values, with its own ``function_id``.
        """
        self.integers, values = tuple(integers), tuple(integers.values())
        if not self._with_values:
            self.by_values = {}
        own = self._with_values.get(values)
        if own is None:
            own = self._with_values[values] = Dispatch(self.slow)
            self.by_values[values] = entry(own)
        own.add(of_integers=False)
        self._by_id[function_id] = own

    def may_be_replayed_by(self, manager: Any, function_id: Any, own: Any = None) -> None:
        """Notes that ``manager`` has a recording with a fast path, and the own memory of its outputs in C++."""
        if self._of_integers:
            with_values = self._by_id.get(function_id)
            if with_values is None:
                return
            with_values.may_be_replayed_by(manager, function_id, own)
        elif self._added != 1:
            return
        self.own = own
        self.replayer, self.function_id = weakref.ref(manager), function_id
        self.thread = binding.thread_id() if PER_THREAD and not self._of_integers else 0
        self._update()
