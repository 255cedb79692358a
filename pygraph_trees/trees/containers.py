"""Tree managers apart from those of the rest of the process.

Upstream keeps one manager a device in a thread-local dictionary of containers, so two ways of running a program share
one, and each ends the other's path. :class:`Trees` holds containers of its own; inside :meth:`Trees.active` they are
the current thread's, and those of the autograd threads that it starts. Functions stay with the manager that they were
added to.

What does not work, and why: putting another dictionary in place. Autograd threads find it through
``torch._C._stash_obj_in_tls``, which takes a reference that it was not given, so the dictionary that is replaced
there is freed while others still hold it, and a later garbage collection crashes. The dictionary stays; its contents
are exchanged.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class Trees:
    """Containers for tree managers."""

    def __init__(self) -> None:
        self._held: dict[int, Any] = {}  # by device index; while active, what was there before
        self._active = False

    def managers(self) -> list[Any]:
        """The tree managers that exist, one a device."""
        containers = _containers() if self._active else self._held
        return [c.tree_manager for c in containers.values() if c.tree_manager is not None]

    @contextmanager
    def active(self) -> Iterator[Trees]:
        """Puts these containers in the place of the current thread's; they are not for two threads at a time."""
        assert not self._active, "these trees are active already"
        current = _containers()
        self._exchange(current)
        try:
            yield self
        finally:
            self._exchange(current)

    def clear(self) -> None:
        """Shuts the managers down and frees their graphs and pools; their functions cannot be called any more.

        Unlike upstream's reset it leaves the other managers of the process as they are.
        """
        for manager in self.managers():
            manager.shutdown()
        (_containers() if self._active else self._held).clear()

    def _exchange(self, current: dict[int, Any]) -> None:
        before = dict(current)
        current.clear()
        current.update(self._held)
        self._held = before
        self._active = not self._active


def _containers() -> dict[int, Any]:
    """The current thread's containers, by device index."""
    from torch._inductor import cudagraph_trees

    found: dict[int, Any] = cudagraph_trees.get_obj(cudagraph_trees.local, "tree_manager_containers")
    return found
