"""The container of a device's manager, which never waits for its own lock.

Upstream's locks are not reentrant, and a manager is made under two of them. A garbage collection meanwhile may run a
finalizer of the program; if that calls a compiled function, the thread waits for its own lock forever. Here the
collector is off while a lock is held, and a manager's objects are freed after its lock is released.

Before torch 2.13, only the thread that imported upstream's module has trees, and threads of autograd; upstream's
assertion stops all others. Here, all threads use those trees.
"""

from __future__ import annotations

import functools
import threading
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch._inductor.cudagraph_trees import TreeManagerContainer as Upstream
from torch._inductor.cudagraph_trees import get_obj, local

from .collector import paused
from .dispatch import PER_THREAD
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


def has_trees() -> bool:
    """Whether torch has made trees for the calling thread, or gives it those of the thread that called autograd."""
    return all(hasattr(local, name) or torch._C._is_key_in_tls(name) for name in _shared)


# By upstream's name: dictionaries by device, which all threads use unless each has its own.
_shared: dict[str, Any] = {"tree_manager_containers": {}, "tree_manager_locks": defaultdict(threading.Lock)}
if has_trees():
    _shared.update((name, get_obj(local, name)) for name in _shared)


def get_container(upstream: Callable[[int], Any]) -> Callable[[int], Any]:
    """Looks up, or makes, the container of a device for the calling thread."""

    @functools.wraps(upstream)
    def get_container(device_index: int) -> Any:
        mark()
        if not PER_THREAD and not has_trees():
            vars(local).update(_shared)
        with paused():
            return upstream(device_index)

    return get_container
