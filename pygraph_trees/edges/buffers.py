"""Buffers of generated code: which are used again, and which partitions write to them.

Inductor would put results into buffers of other operations, which keeps these in order. With lanes, torch's allocator
uses the memory again instead, for each lane.
"""

from __future__ import annotations

import functools
import itertools
from collections import defaultdict
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any

from torch._inductor import config, ir
from torch._inductor.virtualized import V

from pygraph_trees.settings import Settings


def kept_apart(upstream: Callable[[Any, Any], bool]) -> Callable[[Any, Any], bool]:
    """``MemoryPlanningState.__contains__``: no buffer of a GPU can be used again, if lanes may be."""

    @functools.wraps(upstream)
    def contains(state: Any, key: Any) -> bool:
        return upstream(state, key) and not (key[0].type == "cuda" and _are_lanes_possible())

    return contains


def _are_lanes_possible() -> bool:
    is_graphed = config.triton.cudagraphs and not V.graph.cpp_wrapper
    return is_graphed and Settings.current().branches in ("auto", "always")


def written_together(upstream: Callable[..., Any]) -> Callable[..., Any]:
    """``Scheduler.get_graph_partition_signature``: what writes to one buffer is in one partition, or outside of all.

    Several operations write to the result of ``torch.cat``. Each partition would allocate it anew, and would lose what
    the ones before had written.
    """

    @functools.wraps(upstream)
    def get_graph_partition_signature(self: Any, partitions: list[Any], skip_cudagraphs: list[bool]) -> Any:
        while torn := _torn(partitions, skip_cudagraphs):
            self.pygraph_torn = torn | getattr(self, "pygraph_torn", set())
            of_nodes = [
                (skip or node in torn, node)
                for nodes, skip in zip(partitions, skip_cudagraphs, strict=True)
                for node in nodes
            ]
            groups = [
                (skip, [*map(itemgetter(1), found)]) for skip, found in itertools.groupby(of_nodes, itemgetter(0))
            ]
            skip_cudagraphs[:], partitions[:] = map(list, zip(*groups, strict=True))
        return upstream(self, partitions=partitions, skip_cudagraphs=skip_cudagraphs)

    return get_graph_partition_signature


def _torn(partitions: Sequence[Sequence[Any]], skip_cudagraphs: Sequence[bool]) -> set[Any]:
    """The nodes that write to a buffer to which nodes of another partition write as well."""
    writers: dict[str, set[Any]] = defaultdict(set)
    places: dict[str, set[int | None]] = defaultdict(set)  # None: outside of CUDA graphs
    for index, (nodes, skip) in enumerate(zip(partitions, skip_cudagraphs, strict=True)):
        for node in nodes:
            for name in map(_memory_of, node.get_outputs()):
                writers[name].add(node)
                places[name].add(None if skip else index)
    return {node for name, found in places.items() if len(found) > 1 for node in writers[name]}


def _memory_of(output: Any) -> str:
    """The name of the buffer that a node's output is a part of, or its own."""
    name, node = output.get_name(), output.node
    while isinstance(layout := getattr(node, "layout", None), ir.NonOwningLayout):
        name = layout.view.get_name()
        node = V.graph.try_get_buffer(name)
    return str(name)
