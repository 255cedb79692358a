"""Describes the inputs and outputs of a recording that was just made, for the report.

:func:`describe` yields an :class:`~pygraph_trees.report.records.InputRecord` for each input, tensor or not. In the
bytes that each replay copies, elements that a dimension of stride 0 repeats count once. :func:`describe_outputs` tells
where each replay writes the outputs: to own memory, to the graph pool, or to an input.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch._inductor.output_code import index_expanded_dims

from pygraph_trees.indirection.routes import Route
from pygraph_trees.report.records import IN_POOL, ON_INPUT, OWN_MEMORY, InputRecord, OutputRecord

if TYPE_CHECKING:
    from pygraph_trees.indirection.inputs import LiveInputs
    from pygraph_trees.outputs.own_memory import OwnMemory
    from pygraph_trees.reasons import Why


def describe(
    node: Any, live: LiveInputs | None, copied: Collection[int], why_copied: Mapping[int, Why]
) -> Iterator[InputRecord]:
    """Yields each input's record.

    Args:
        node: the recording; only upstream's attributes are read.
        live: the live inputs that are given by address.
        copied: the indices of the inputs that upstream copies.
        why_copied: the reasons, by index.
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
        decision = decisions.get(index)
        route = Route.PATCH if decision is None else decision.route
        if decision is not None:
            is_copied, why = route is Route.COPY, decision.reason
        else:
            is_copied, why = index in copied, why_copied.get(index)
        device = value.device
        yield InputRecord(
            *(index, name, kind, devices.get(device) or devices.setdefault(device, str(device))),
            _nbytes(value),
            _nbytes(index_expanded_dims(value, node.expanded_dims[index])) if is_copied else 0,
            index in mutated,
            None if kind not in ("live", "output") else "copy" if is_copied else route.value,
            why if is_copied else None,
        )


def describe_outputs(node: Any, live: LiveInputs | None, own: OwnMemory | None) -> Iterator[OutputRecord]:
    """Yields an :class:`~pygraph_trees.report.records.OutputRecord` for each output that is a tensor.

    For own memory, the record also has the number of nodes that hold its address, and the bytes that the graph copies
    there.

    Args:
        node: the recording; only upstream's attributes are read.
        live: its inputs that are given by address.
        own: the own memory of its outputs.
    """
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


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
