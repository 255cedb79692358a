"""The inputs that a recording copies at each call, to the memory that the graph reads, and back if it writes there.

A queued launch may use that memory until :attr:`CopiedInputs.launches` says that it is over.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from pygraph_trees.cuda.extent import flat

from .retired import LastLaunches

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from .live_input import Item

    Given = Mapping[int, torch.Tensor] | Sequence[Any]  # a call's tensors, by index


class CopiedInputs:
    def __init__(self, items: Iterable[Item] = ()) -> None:
        self._items = {item.index: item for item in items}
        self.mutated = tuple(item for item in self._items.values() if item.mutated)
        self.launches = LastLaunches()

    def __len__(self) -> int:
        return len(self._items)

    def get(self, index: int) -> Item | None:
        return self._items.get(index)

    def copy_in(self, given: Given) -> None:
        """Before the launch."""
        if self._items:
            self.launches.begin()
        for item in self._items.values():
            flat(item.placeholder_tensor).copy_(flat(given[item.index]))

    def copy_back(self, given: Given, device: int) -> None:
        """After the launch on the current stream."""
        for item in self.mutated:
            write(given[item.index], item.placeholder_tensor)
        if self._items:
            self.launches.end(device)


def write(given: torch.Tensor, copy: torch.Tensor) -> None:
    """Writes a copy back to an input. Autograd does not see it, as it does not see what kernels write."""
    given.data.copy_(copy)
