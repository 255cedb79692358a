"""Describes a recording's outputs for the report: where each replay writes them, and their bytes.

:func:`describe_outputs` reads a recording that was just made. An output is in own memory, in the graph pool, or on an
input. For own memory, the record also has the number of nodes that hold its address, and the bytes that the graph
copies there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pygraph_trees.report.records import IN_POOL, ON_INPUT, OWN_MEMORY

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pygraph_trees.indirection.inputs import LiveInputs
    from pygraph_trees.outputs.own_memory import OwnMemory


def describe_outputs(node: Any, live: LiveInputs | None, own: OwnMemory | None) -> Iterator[tuple[Any, ...]]:
    """Yields the fields of an :class:`~pygraph_trees.report.records.OutputRecord` for each output that is a tensor.

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
                yield number, ON_INPUT, sizes[index]
                continue
            copied = sizes[index] if blocks[number].allocation is None else 0
            yield number, OWN_MEMORY, sizes[index], len(live.kernels_holding([index])), copied
        elif isinstance(made_of, dict):
            yield number, ON_INPUT if alias is None else IN_POOL, made_of["nbytes"]
