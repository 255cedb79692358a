"""Describes a recording's outputs for the report: where each replay writes them, and their bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pygraph_trees.report.records import HANDED_OUT, IN_POOL, ON_INPUT

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pygraph_trees.indirection.inputs import LiveInputs

    from .handed_outputs import Templates


def describe_outputs(node: Any, live: LiveInputs | None, templates: Templates | None) -> Iterator[tuple[Any, ...]]:
    """Yields the fields of an :class:`~pygraph_trees.report.records.OutputRecord` for each output that is a tensor.

    Args:
        node: the recording; only upstream's attributes are read.
        live: its inputs that are given by address.
        templates: of its last inputs, which are memory for outputs.
    """
    on_live = {} if live is None else live.outputs
    sizes = {} if live is None else {item.index: item.placeholder_tensor.nbytes for item in live.items}
    handed = {} if templates is None else dict(zip(templates.handed.outputs, templates.handed.allocations, strict=True))
    for number, (made_of, alias) in enumerate(zip(node.outputs_metadata, node.output_storage_alias, strict=True)):
        if number in on_live and live is not None:
            index, _ = on_live[number]
            if number not in handed:
                yield number, ON_INPUT, sizes[index]
                continue
            copied = 0 if handed[number] is not None else sizes[index]
            yield number, HANDED_OUT, sizes[index], len(live.kernels_holding([index])), copied
        elif isinstance(made_of, dict):
            yield number, ON_INPUT if alias is None else IN_POOL, made_of["nbytes"]
