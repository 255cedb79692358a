"""Why a function is recorded at this point: :func:`why_recorded`, asked just before upstream records.

The recordings of the same function at the same position were found not to fit the inputs. The newest of them is
compared once more, by addresses alone: upstream's own check may change the inputs when it succeeds, so it is not
asked twice.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch

if TYPE_CHECKING:
    from pygraph_trees.report.log import FunctionLog

_MOST_NAMES = 4


class Tree(Protocol):
    """Where a manager stands among its recordings."""

    current_node: Any
    roots: Any


def why_recorded(tree: Tree, inputs: list[Any], function_id: Any, function: FunctionLog) -> str:
    """One line: "first call", what moved since the newest recording here, or after which recording this one comes."""
    node = tree.current_node
    siblings = (tree.roots if node is None else node.children).get(function_id, [])
    if siblings:
        return _difference(siblings[-1], inputs)
    if node is None:
        return "first call with these sizes" if function.recordings else "first call"
    return f"first call after recording {node.id.id}"


def _difference(recorded: Any, inputs: list[Any]) -> str:
    managed = set(recorded.cudagraph_managed_idxs)
    found = [i for i in sorted(managed | set(recorded.static_input_idxs)) if moved(recorded, inputs, i)]
    if not found and getattr(recorded, "unfit", None):
        return str(recorded.unfit)
    if not found:
        return "other outputs are alive than when it was recorded"
    names = [_name(recorded, i) for i in found[:_MOST_NAMES]]
    more = f" and {len(found) - _MOST_NAMES} more" if len(found) > _MOST_NAMES else ""
    kind = "managed" if found[0] in managed else "static"
    return f"{kind} input {', '.join(names)}{more} moved"


def moved(recorded: Any, inputs: list[Any], index: int) -> bool:
    """Whether an input is not where it was when this was recorded."""
    address = recorded.static_input_data_ptrs[index]
    value = inputs[index]
    if address is None or not isinstance(value, torch.Tensor):
        return False
    try:
        return value.data_ptr() != address
    except RuntimeError:  # an output that was overwritten; upstream raises where it reads it
        return True


def _name(recorded: Any, index: int) -> str:
    placeholders = recorded.wrapped_function.placeholders
    return placeholders[index].name if index < len(placeholders) else str(index)
