"""Which thread uses a device's graphs before torch 2.13, where threads share the trees.

The first one that calls a function, until it ends or resets the trees, or until it makes no graphed call for a second
while others ask, and has no output in the graph pool, as a thread that has warmed up a server. Others run un-graphed.
Since torch 2.13, each thread has its own trees, and all questions here are answered so. README.md has the reasons.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from pygraph_trees.reasons import Reason
from pygraph_trees.report.naming import BACKWARD, FORWARD

from ..pools import pools
from ..pools.collector import paused
from .containment import described
from .dispatch import PER_THREAD, forget_replayers
from .fast_path import Call
from .threads import Thread, mark

if TYPE_CHECKING:
    from pygraph_trees.report.log import FunctionLog

IDLE_S = 1.0

_log = logging.getLogger("pygraph_trees.trees")


class _Home:
    """The thread that uses a device's graphs."""

    def __init__(self, thread: Thread) -> None:
        self.thread = weakref.ref(thread)
        self.let_in = 0  # calls that are not known to be replays
        self.calls = -1  # these, and graphed calls of the device's managers, as another thread saw them last
        self.since = 0.0  # when there were others


_homes: dict[int, _Home] = {}  # by device
_lock = threading.RLock()  # for changes; never held while the GPU, another lock or a finalizer is waited for
_unmarked = Thread(0)  # all backwards of threads that have made no other call; it never ends


def _caller() -> Thread:
    return mark() or _unmarked


def _user(device: int) -> Thread | None:
    return None if (home := _homes.get(device)) is None else home.thread()


def is_used_elsewhere(device: int) -> bool:
    """Whether another thread than the calling one uses a device's graphs."""
    user = None if PER_THREAD else _user(device)
    return user is not None and user is not _unmarked and user is not _caller()


def is_left_out(device: int) -> bool:
    """Whether another thread uses a device's graphs, and a forward of the calling one has therefore run un-graphed."""
    return is_used_elsewhere(device) and _caller().trains_ungraphed


def may_use(device: int) -> bool:
    """Whether the calling thread may use a device's graphs; if no thread does, this one does from now on."""
    if PER_THREAD:
        return True
    caller, home = _caller(), _homes.get(device)
    if home is not None and (user := home.thread()) is not None:
        home.let_in += user is caller
        return user is caller
    with paused(), _lock:
        user = _user(device)
        # A backward of an unmarked thread never takes over: it would keep the graphs forever.
        if user is None and (caller is not _unmarked or device not in _homes):
            user = _move_in(device, caller)
        return user is caller


def _move_in(device: int, thread: Thread) -> Thread:
    forget_replayers()  # in backwards, a new mark may have the address of an ended thread's
    thread.trains_ungraphed = False
    _homes[device] = _Home(thread)
    return thread


def leave(*, unmarked: bool) -> None:
    """The calling thread uses no device's graphs any more: it has reset them, and perhaps those of unmarked threads."""
    gone = {_caller(), *([_unmarked] if unmarked else ())}
    with paused(), _lock:
        for device in list(_homes):
            if _user(device) in gone:
                del _homes[device]


def takes_over(device: int) -> bool:
    """Whether the thread that used a device's graphs is idle, so that the calling one uses them from now on.

    This ends the open path. Its outputs must be dead: a write of the other thread while they are moved would be lost.
    """
    caller, home = _caller(), _homes.get(device)
    managers = [manager for manager in pools.managers() if manager.device_index == device]
    # A thread without a mark, in a backward, would keep the graphs forever.
    if home is None or caller is _unmarked:
        return False
    # Backwards of unmarked threads would keep all forwards un-graphed.
    if home.thread() is not _unmarked and not _is_idle(home, managers):
        return False
    trained = caller.trains_ungraphed
    with paused(), _lock:
        if _homes.get(device) is not home:
            return False
        _move_in(device, caller)  # from here on, the other thread begins no call that is graphed
    is_over = False
    try:
        is_over = all(manager.end_step(if_dead=True) for manager in managers)
    except Exception as error:
        _log.warning("a thread could not use the graphs of another one: %s", described(error))
    finally:  # an interrupt may have come
        if not is_over:
            with paused(), _lock:
                if _user(device) is caller:
                    forget_replayers()
                    _homes[device], caller.trains_ungraphed = home, trained
    return is_over


def _is_idle(home: _Home, managers: Sequence[Any]) -> bool:
    """Whether no call was graphed for :data:`IDLE_S`; after True, it takes as long until the next True.

    There are no managers of ours if the functions of the device are gone, if the first call is just making one, and for
    graphs without trees.
    """
    now, calls = time.monotonic(), home.let_in + sum(manager.turns - manager.asides for manager in managers)
    is_same = calls == home.calls  # fewer: a reset made new managers, which have made calls since
    is_idle = is_same and now - home.since >= IDLE_S
    if not is_same or is_idle:
        home.calls, home.since = calls, now
    return is_idle


def way_elsewhere(device: int, log: FunctionLog, ungraphed: Call, noted: Call) -> Callable[[bool], Call | None]:
    """Returns a function that is told whether a call would be graphed, and gives its way; None if it may be.

    ``noted`` runs a backward un-graphed and tells the manager, which waits for it if its forward was graphed.
    """

    def way(is_graphed: bool) -> Call | None:
        if may_use(device) if is_graphed else not is_used_elsewhere(device):
            return None
        if is_graphed:
            if log.mode != BACKWARD and takes_over(device):
                return None
            log.not_graphed(Reason.OTHER_THREAD())
        if (thread := mark()) is not None and log.mode == FORWARD:
            thread.trains_ungraphed = True
        return noted if log.mode == BACKWARD else ungraphed  # its forward may have been graphed

    return way
