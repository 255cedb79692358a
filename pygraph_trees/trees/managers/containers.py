"""Tree managers that are separate from those of the rest of the process.

Two ways of running a program would share the managers of a thread, and each would end the other's path. Inside
:meth:`Trees.active`, the current thread and the autograd threads that it starts use other ones. A function stays with
the manager that it was added to.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class Trees:
    def __init__(self) -> None:
        self._held: dict[int, Any] = {}  # containers by device index; while active, the thread's earlier ones
        self._active = False

    def managers(self) -> list[Any]:
        """The tree managers that exist, at most one per device."""
        containers = _containers() if self._active else self._held
        return [c.tree_manager for c in containers.values() if c.tree_manager is not None]

    @contextmanager
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


def _containers() -> dict[int, Any]:
    from torch._inductor import cudagraph_trees

    return cudagraph_trees.get_obj(cudagraph_trees.local, "tree_manager_containers")
