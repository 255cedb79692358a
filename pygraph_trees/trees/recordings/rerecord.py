"""The reason for a recording, as one line for its log.

:func:`why_recorded` must be called just before upstream records. At that time, no recording of the function at this
position fits the inputs. The newest of them is compared with the inputs by address only: upstream's own check may
change the inputs if it succeeds, so it is not called twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from pygraph_trees.reasons import Reason, Why

if TYPE_CHECKING:
    from pygraph_trees.report.log import FunctionLog

_MOST_NAMES = 4


def siblings_of(tree: Any, function_id: Any) -> Sequence[Any]:
    """The recordings of a function at the current position, the newest last."""
    node = tree.current_node
    found: Sequence[Any] = (tree.roots if node is None else node.children).get(function_id, ())
    return found


def why_recorded(tree: Any, inputs: list[Any], function_id: Any, function: FunctionLog) -> Why:
    """A first call, the inputs that moved since the newest recording here, or the recording before it."""
    node, siblings = tree.current_node, siblings_of(tree, function_id)
    if siblings:
        return _difference(siblings[-1], inputs)
    if node is None and function.recordings:
        model = tree.ids_to_funcs[function_id].model
        added = sum(other.model is model for other in list(tree.ids_to_funcs.values()))  # in this thread
        return Reason.FIRST_SIZES() if added > 1 else Reason.FIRST_IN_THREAD()
    return Reason.FIRST() if node is None else Reason.FIRST_AFTER(number=node.id.id)


def _difference(recorded: Any, inputs: list[Any]) -> Why:
    managed = set(recorded.cudagraph_managed_idxs)
    found = [i for i in sorted(managed | set(recorded.static_input_idxs)) if moved(recorded, inputs, i)]
    if not found:
        unfit: Why | None = getattr(recorded, "unfit", None)
        return unfit or Reason.OTHERS_ALIVE()
    names = [name_of_input(recorded, i) for i in found[:_MOST_NAMES]]
    more = f" and {len(found) - _MOST_NAMES} more" if len(found) > _MOST_NAMES else ""
    kind = "managed" if found[0] in managed else "static"
    return Reason.MOVED(kind=kind, names=f"{', '.join(names)}{more}")


def moved(recorded: Any, inputs: list[Any], index: int) -> bool:
    """Whether an input's address differs from its recorded one."""
    address = recorded.static_input_data_ptrs[index]
    value = inputs[index]
    if address is None or not isinstance(value, torch.Tensor):
        return False
    try:
        return value.data_ptr() != address
    except RuntimeError:  # an output that was overwritten; upstream raises when it reads it
        return True


def name_of_input(recorded: Any, index: int) -> str:
    placeholders = recorded.wrapped_function.placeholders
    return str(placeholders[index].name) if index < len(placeholders) else str(index)
