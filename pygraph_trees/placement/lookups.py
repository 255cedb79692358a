"""Lookups: operators that read elements at indices, which are among their inputs.

An index out of bounds raises on the CPU, and the program goes on; on the GPU it ends all work of the process. A lookup
moves to the GPU only if :func:`looks_up_within` is true. The functions change nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import unset_fake_temporarily

from .nodes import aten

# From a lookup to the position of its indices among the arguments.
LOOKUPS = {aten.index: 1, aten.index_select: 2, aten.gather: 2, aten.embedding: 1}


def indices_of(node: fx.Node) -> list[fx.Node]:
    """The inputs whose numbers select the node's elements."""
    if not isinstance(node.target, torch._ops.OpOverload) or node.target.overloadpacket not in LOOKUPS:
        return []
    given = node.args[LOOKUPS[node.target.overloadpacket]]
    return [index for index in (given if isinstance(given, (list, tuple)) else [given]) if isinstance(index, fx.Node)]


def looks_up_within(node: fx.Node, value_of: Callable[[fx.Node], torch.Tensor | None]) -> bool:
    """Whether constant indices are known to be within the size of the dimension that they index.

    Args:
        value_of: the tensor that a node gives in every call, None if it is unknown.
    """
    looked_up: Any = node.args[0]
    given = node.args[1]  # one index per dimension, or a dimension, or the index into the first dimension
    dim = given if isinstance(given, int) else 0
    places = enumerate(given) if isinstance(given, (list, tuple)) else ((dim, index) for index in indices_of(node))
    for place, index in places:
        if not isinstance(index, fx.Node):
            continue
        size = looked_up.meta["val"].shape[place] if looked_up.meta["val"].dim() else 1
        value = value_of(index)
        if value is None or not isinstance(size, int):
            return False
        least = -size if node.target is aten.index.Tensor else 0  # negative indices count from the end
        with unset_fake_temporarily():
            if value.numel() and not least <= int(value.min()) <= int(value.max()) < size:
                return False
    return True


def is_by_integers(node: fx.Node) -> bool:
    """Whether the node is an index whose number of elements does not depend on the values."""
    masks = (torch.bool, torch.uint8)
    return node.target is aten.index.Tensor and not any(i.meta["val"].dtype in masks for i in indices_of(node))
