"""The container of a device's manager, which never waits for its own lock.

Upstream's locks are not reentrant, and a manager is made under two of them. A garbage collection meanwhile may run a
finalizer of the program; if that calls a compiled function, the thread waits for its own lock forever. Here the
collector is off while a lock is held, and a manager's objects are freed after its lock is released.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch._inductor.cudagraph_trees import TreeManagerContainer as Upstream

from .collector import paused
from .manager import Manager
from .threads import mark


class ManagerContainer(Upstream):
    """The manager of one device, as long as functions use it."""

    def get_tree_manager(self, *args: Any, **kwargs: Any) -> Any:
        manager = self.tree_manager
        if manager is not None:
            return manager
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
        del manager


def get_container(upstream: Callable[[int], Any]) -> Callable[[int], Any]:
    """Looks up, or makes, the container of a device for the calling thread."""

    @functools.wraps(upstream)
    def get_container(device_index: int) -> Any:
        mark()
        with paused():
            return upstream(device_index)

    return get_container
