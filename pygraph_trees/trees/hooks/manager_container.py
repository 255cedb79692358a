"""The container of a device's manager, and each thread's trees.

Upstream's locks are not reentrant, and a finalizer of the program that a garbage collection runs under one could wait
for it forever. Here the collector is off while a lock is held, and a manager's objects are freed after its release.
Since torch 2.13, each thread has trees of its own. Before, upstream makes them only for the thread that imports its
module; here, the thread that uses graphs is lent these (:mod:`.home`).
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._inductor.cudagraph_trees import TreeManagerContainer as Upstream
from torch._inductor.cudagraph_trees import get_obj, local

from ..functions.dispatch import PER_THREAD
from ..functions.home import is_used_elsewhere, leave
from ..functions.threads import mark, stash
from ..managers.manager import Manager
from ..pools.collector import paused


class ManagerContainer(Upstream):
    """The manager of one device, as long as functions use it."""

    def get_tree_manager(self, *args: Any, **kwargs: Any) -> Any:
        if self.tree_manager is not None:
            return self.tree_manager
        with paused():
            return super().get_tree_manager(*args, **kwargs)

    def add_strong_reference(self, fn: Callable[..., Any]) -> None:
        with paused():
            super().add_strong_reference(fn)

    def finalize_cudagraphify_fn(self) -> None:
        manager = self.tree_manager  # freed at the end of this function
        with paused():
            super().finalize_cudagraphify_fn()
        if isinstance(manager, Manager) and self.tree_manager is not manager:
            manager.move_last_outputs()


def new_trees() -> dict[str, Any]:
    """Upstream's dictionaries of one thread's trees, by device, under the names by which upstream looks for them."""
    return {"tree_manager_containers": {}, "tree_manager_locks": defaultdict(threading.Lock)}


# For backwards of threads without trees. Before torch 2.13, the only trees, whichever thread uses graphs.
_of_others = new_trees()


def _containers() -> dict[int, Any]:
    """The calling thread's containers, by device."""
    return get_obj(local, "tree_manager_containers")


class Trees:
    """Tree managers that are separate from those of the rest of the process.

    Two ways of running a program would share the managers of a thread, and each would end the other's path. Inside
    :meth:`active`, the current thread and the autograd threads that it starts use these. A function stays with the
    manager that it was added to.
    """

    def __init__(self) -> None:
        self._held: dict[int, Any] = {}  # containers by device index; while active, the thread's earlier ones
        self._active = False

    def managers(self) -> list[Any]:
        """The tree managers that exist, at most one per device."""
        containers = _containers() if self._active else self._held
        return [c.tree_manager for c in containers.values() if c.tree_manager is not None]

    @contextlib.contextmanager
    def active(self) -> Iterator[Trees]:
        """Replaces the current thread's containers by these; only one thread at a time may do so."""
        assert not self._active, "these trees are active already"
        current = _containers()
        self._exchange(current)
        try:
            yield self
        finally:
            self._exchange(current)

    def clear(self) -> None:
        """Shuts these managers down, and no others; their functions must not be called afterwards."""
        for manager in self.managers():
            manager.shutdown()
        (_containers() if self._active else self._held).clear()

    def _exchange(self, current: dict[int, Any]) -> None:
        # The dictionary itself must stay: replacing it crashes a later garbage collection (README.md).
        before = dict(current)
        current.clear()
        current.update(self._held)
        self._held = before
        self._active = not self._active


def has_trees() -> bool:
    """Whether the calling thread has trees, or, in a backward, the thread that began it."""
    return all(hasattr(local, name) or torch._C._is_key_in_tls(name) for name in _of_others)


@contextlib.contextmanager
def _lent(trees: dict[str, Any]) -> Iterator[None]:
    before = dict(vars(local))
    vars(local).update(trees)
    try:
        yield
    finally:
        vars(local).clear()
        vars(local).update(before)


@contextlib.contextmanager
def without_others() -> Iterator[None]:
    """Inside a reset before torch 2.13, upstream finds no trees of a device whose graphs another thread uses."""
    if PER_THREAD or not has_trees():  # upstream resets nothing of a thread without trees
        yield
        return
    shared, trees = _of_others["tree_manager_containers"], _containers()
    devices = [device for device in list(trees) if trees is not shared or not is_used_elsewhere(device)]
    try:
        if trees is not shared:
            yield
            return
        own, locks = {device: shared[device] for device in devices}, dict(_of_others["tree_manager_locks"])
        with _lent({"tree_manager_containers": own, "tree_manager_locks": locks}):  # other threads may add to ours
            yield
    finally:
        if trees is shared:
            for device in devices:
                shared.pop(device, None)
        leave(unmarked=trees is shared)


if not PER_THREAD and has_trees():
    _of_others.update((name, get_obj(local, name)) for name in tuple(_of_others))
    # They outlive the importing thread, at whose end torch 2.11 releases references that it never took.
    for kept in _of_others.values():
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))


def get_container(upstream: Callable[[int], Any]) -> Callable[[int], Any]:
    """Looks up, or makes, the container of a device for the calling thread."""

    @functools.wraps(upstream)
    def get_container(device_index: int) -> Any:
        thread = mark()
        with paused(), contextlib.ExitStack() as stack:
            if thread is None or not has_trees():
                if not PER_THREAD or torch._C._current_graph_task_id() >= 0:
                    stack.enter_context(_lent(_of_others))
                else:
                    for name, trees in new_trees().items():
                        stash(name, trees)
                        setattr(local, name, trees)
            return upstream(device_index)

    return get_container
