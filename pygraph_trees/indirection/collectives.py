"""The collectives of one capture: the nodes that they add, and the tensors that they are given.

A kernel of NCCL may hide addresses from :func:`.relocations.scan`: other devices and buffers of the library hold them,
too. But an operator for a collective accesses only its tensors and the library's own memory. So the inputs in its
tensors' storages are copied, and its nodes hide no others.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pygraph_trees.cuda.driver import Driver
from pygraph_trees.errors import DriverError

NAMESPACES = frozenset({"_c10d_functional", "_c10d_functional_autograd", "_dtensor", "symm_mem"})  # of torch.ops


class Collectives(TorchDispatchMode):
    """Notes the calls of operators for collectives while a stream captures."""

    supports_higher_order_operators = True

    def __init__(self, driver: Driver, stream: int) -> None:
        super().__init__()
        self._driver, self._stream = driver, stream
        self.nodes: set[int] = set()  # handles; without those of a call during which they could not be listed
        self.storages: set[int] = set()  # addresses of the storages of all tensors that are given to them

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "namespace", None) not in NAMESPACES:
            return func(*args, **kwargs)
        given = (leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor))
        self.storages.update(tensor.untyped_storage().data_ptr() for tensor in given)
        before = self._captured()
        result = func(*args, **kwargs)
        after = self._captured()
        if before is not None and after is not None:
            self.nodes |= after - before
        return result

    def _captured(self) -> set[int] | None:
        """The nodes captured so far; None if the driver cannot tell."""
        try:
            graph = self._driver.capturing_graph(self._stream)
            return None if graph is None else set(self._driver.nodes(graph))
        except DriverError:
            return None
