"""Tree managers apart from those of the rest of the process.

Upstream keeps one manager a device in thread-local containers, so two ways of running a program share one, and each
ends the other's path. :class:`Trees` holds containers of its own; inside :meth:`Trees.active` they are the current
thread's, and those of the autograd threads that it starts. Functions stay with the manager that they were added to.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

_KEYS = ("tree_manager_containers", "tree_manager_locks")


class Trees:
    """Containers for tree managers."""

    def __init__(self) -> None:
        self._held: dict[str, Any] = {_KEYS[0]: {}, _KEYS[1]: defaultdict(threading.Lock)}

    def managers(self) -> list[Any]:
        """The tree managers that exist, one a device."""
        containers = self._held[_KEYS[0]].values()
        return [c.tree_manager for c in containers if c.tree_manager is not None]

    @contextmanager
    def active(self) -> Iterator[Trees]:
        """Puts these containers in the place of the current thread's."""
        from torch._inductor import cudagraph_trees

        before = {key: cudagraph_trees.get_obj(cudagraph_trees.local, key) for key in _KEYS}
        self._put(cudagraph_trees.local, self._held)
        try:
            yield self
        finally:
            self._put(cudagraph_trees.local, before)

    def clear(self) -> None:
        """Shuts the managers down and frees their graphs and pools; their functions cannot be called any more.

        Unlike upstream's reset it leaves the other managers of the process as they are.
        """
        for manager in self.managers():
            manager.shutdown()
        self._held[_KEYS[0]].clear()

    @staticmethod
    def _put(local: Any, held: dict[str, Any]) -> None:
        for key, value in held.items():
            setattr(local, key, value)
            torch._C._stash_obj_in_tls(key, value)
