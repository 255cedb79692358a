"""Describes a recording for the report: why it is made, its inputs, and its outputs.

:func:`why_recorded` must be called just before upstream records: no recording of the function at this position fits the
inputs then. The newest is compared by address only, since upstream's own check may change the inputs.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch._inductor.output_code import index_expanded_dims

from pygraph_trees.indirection.routes import Decision, Route
from pygraph_trees.reasons import Reason, Why
from pygraph_trees.report.records import IN_POOL, ON_INPUT, OWN_MEMORY, InputRecord, OutputRecord

if TYPE_CHECKING:
    from pygraph_trees.indirection.inputs import LiveInputs
    from pygraph_trees.outputs.own_memory import OwnMemory
    from pygraph_trees.report.log import FunctionLog

_MOST_NAMES = 4  # of inputs that moved


def describe(
    node: Any, live: LiveInputs | None, copied: Collection[int], why_copied: Mapping[int, Why]
) -> Iterator[InputRecord]:
    """Yields a record for each input of a recording, tensor or not. It reads only attributes that upstream's have too.

    In the bytes that each replay copies, elements that a dimension of stride 0 repeats count once.
    """
    placeholders, mutated = node.wrapped_function.placeholders, set(node.wrapped_function.mutated_input_idxs)
    static, managed = set(node.static_input_idxs), set(node.cudagraph_managed_idxs)
    placeholder_tensors = {} if live is None else {item.index: item.placeholder_tensor for item in live.items}
    decisions = {} if live is None else live.decisions
    own = getattr(node, "own", None)
    first_output = len(node.reconstructed_inputs) if own is None else own.takes
    devices: dict[torch.device, str] = {}
    for index, value in enumerate(node.reconstructed_inputs):
        name = placeholders[index].name if index < len(placeholders) else None
        value = placeholder_tensors.get(index, value)
        if not isinstance(value, torch.Tensor):
            yield InputRecord(index, name, "value", None, 0, 0, index in mutated)
            continue
        kind = "managed" if index in managed else "static" if index in static else "live"
        kind = "output" if index >= first_output else kind
        usual = Route.COPY if index in copied else Route.PATCH
        decision = decisions.get(index) or Decision(usual, why_copied.get(index))
        is_copied, device = decision.route is Route.COPY, value.device
        yield InputRecord(
            *(index, name, kind, devices.get(device) or devices.setdefault(device, str(device))),
            value.nbytes,
            index_expanded_dims(value, node.expanded_dims[index]).nbytes if is_copied else 0,
            index in mutated,
            decision.route.value if kind in ("live", "output") else None,
            decision.reason if is_copied else None,
        )


def describe_outputs(node: Any, live: LiveInputs | None, own: OwnMemory | None) -> Iterator[OutputRecord]:
    """Yields the record of each output that is a tensor; for own memory, it has its nodes and copied bytes."""
    on_live = {} if live is None else live.outputs
    sizes = {} if live is None else {item.index: item.placeholder_tensor.nbytes for item in live.items}
    blocks = {} if own is None else own.outputs
    for number, (made_of, alias) in enumerate(zip(node.outputs_metadata, node.output_storage_alias, strict=True)):
        if number in on_live and live is not None:
            index, _ = on_live[number]
            if own is None or index < own.takes:
                yield OutputRecord(number, ON_INPUT, sizes[index])
                continue
            copied = sizes[index] if blocks[number].allocation is None else 0
            yield OutputRecord(number, OWN_MEMORY, sizes[index], len(live.kernels_holding([index])), copied)
        elif isinstance(made_of, dict):
            yield OutputRecord(number, ON_INPUT if alias is None else IN_POOL, made_of["nbytes"])


def siblings_of(tree: Any, function_id: Any) -> Sequence[Any]:
    """The recordings of a function at the current position, the newest last."""
    node = tree.current_node
    return (tree.roots if node is None else node.children).get(function_id, ())


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
