"""Lookups: operators that read elements at indices, which are among their inputs.

An index out of bounds raises on the CPU, and the program goes on; on the GPU it ends all work of the process. A lookup
moves to the GPU only if :func:`looks_up_within` is true. :func:`roots_of` follows a value to the nodes whose elements
it consists of. The functions change nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import unset_fake_temporarily

from .nodes import REARRANGES, aten, is_constructor, tensors_of

# From a lookup to the position of its indices among the arguments.
LOOKUPS = {aten.index: 1, aten.index_select: 2, aten.gather: 2, aten.embedding: 1, aten.index_put: 1}
_COUNT_FROM_THE_END = frozenset({aten.index, aten.index_put})  # negative indices
# The result consists of elements of the inputs, whatever their values.
_PASSES_ELEMENTS = REARRANGES | {aten.view, aten.roll, aten.cat, aten.stack}


def indices_of(node: fx.Node) -> list[fx.Node]:
    """The inputs whose numbers select the node's elements."""
    if not isinstance(node.target, torch._ops.OpOverload) or node.target.overloadpacket not in LOOKUPS:
        return []
    given = node.args[LOOKUPS[node.target.overloadpacket]]
    return [index for index in (given if isinstance(given, (list, tuple)) else [given]) if isinstance(index, fx.Node)]


def looks_up_within(node: fx.Node, value_of: Callable[[fx.Node], torch.Tensor | None]) -> bool:
    """Whether constant indices are known to be within the size of the dimension that they index.

    A constructor of symbolic size is not checked: Inductor's code for the CPU does not check it either.

    Args:
        value_of: the tensor that a node gives in every call, None if it is unknown.
    """
    target: Any = node.target
    looked_up: Any = node.args[0]
    given = node.args[1]  # one index per dimension, or a dimension, or the index into the first dimension
    if isinstance(given, (list, tuple)) and len(given) > 1 and any(is_mask(index) for index in indices_of(node)):
        return False  # a mask stands for several dimensions
    dim = given if isinstance(given, int) else 0
    places = enumerate(given) if isinstance(given, (list, tuple)) else ((dim, index) for index in indices_of(node))
    for place, index in places:
        size = looked_up.meta["val"].shape[place] if looked_up.meta["val"].dim() else 1
        for root in roots_of(index) if isinstance(index, fx.Node) else []:
            value = value_of(root)
            if value is None and _is_counted(root):
                continue
            least = -size if target.overloadpacket in _COUNT_FROM_THE_END and isinstance(size, int) else 0
            if value is None or not isinstance(size, int) or not _is_within(value, least, size):
                return False
    return True


def is_by_integers(node: fx.Node) -> bool:
    """Whether the node is an index whose number of elements does not depend on the values."""
    return node.target is aten.index.Tensor and not any(map(is_mask, indices_of(node)))


def is_mask(index: fx.Node) -> bool:
    """Whether an index selects where it is true."""
    return index.meta["val"].dtype in (torch.bool, torch.uint8)


def roots_of(node: fx.Node) -> list[fx.Node]:
    """The nodes whose elements a value consists of."""
    found, todo = [], [node]
    while todo:
        current = todo.pop()
        target: Any = current.target
        passes = isinstance(target, torch._ops.OpOverload) and target.overloadpacket in _PASSES_ELEMENTS
        todo += current.all_input_nodes if passes else []
        found += [] if passes else [current]
    return found


def _is_counted(node: fx.Node) -> bool:
    """Whether the node depends on constructors alone."""
    seen, todo = {node}, [node]
    while todo:
        current = todo.pop()
        sources = [source for source in current.all_input_nodes if tensors_of(source)]
        if not (sources or is_constructor(current)):
            return False
        todo += [source for source in sources if source not in seen]
        seen.update(sources)
    return True


def _is_within(indices: torch.Tensor, least: int, size: int) -> bool:
    with unset_fake_temporarily():
        return not indices.numel() or least <= int(indices.min()) <= int(indices.max()) < size
