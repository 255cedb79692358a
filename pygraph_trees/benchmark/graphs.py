"""Reads what a way's tree managers hold, and which of their recordings one call replays.

The functions accept upstream's recordings and ours. Ours log their replays and copied bytes, and these logs are used.
For upstream's, the bytes follow from the inputs that a replay copies, and replays are counted by wrapping ``run_graph``
for one call. If the order of launches is ambiguous, their names are left out.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from pygraph_trees.compat import lists_copied_inputs
from pygraph_trees.report.text import called


def recordings(managers: Iterable[Any]) -> list[Any]:
    """All recordings in the trees of ``managers``, parents before children."""
    found = [node for manager in managers for nodes in (manager.roots or {}).values() for node in nodes]
    for node in found:  # the list grows as it is read
        found += itertools.chain.from_iterable(node.children.values())
    return found


def copied_nbytes(node: Any) -> int:
    """Bytes of GPU inputs that a replay of ``node`` copies into the recording."""
    if hasattr(node, "log"):
        return sum(i.copied_bytes for i in node.log.record().inputs if (i.device or "").startswith("cuda"))
    copied = node.input_copy_idxs if lists_copied_inputs(node) else node.non_static_input_idx
    return sum(
        tensor.nbytes // math.prod(max(1, tensor.size(dim)) for dim in node.expanded_dims[i] or ())
        for i, tensor in ((i, node.reconstructed_inputs[i]) for i in copied)
        if isinstance(tensor, torch.Tensor) and tensor.device.type == "cuda"
    )


def copied_for_one_call(managers: Iterable[Any]) -> int:
    """Bytes of inputs copied for single calls so far, in addition to those that each replay copies."""
    return sum(node.log.extra_copied_bytes for node in recordings(managers) if hasattr(node, "log"))


@contextlib.contextmanager
def watch_replays(managers: Sequence[Any]) -> Iterator[Counter[Any]]:
    """Counts replays by recording while the block runs; the counter is complete when the block ends."""
    nodes = recordings(managers)
    before = {node: node.log.replays for node in nodes if hasattr(node, "log")}
    kind = next((type(node) for node in nodes if node not in before), None)  # upstream's have one class
    run_graph: Any = getattr(kind, "run_graph", None)
    seen: Counter[Any] = Counter()

    def counted(node: Any) -> Any:
        seen[node] += 1
        return run_graph(node)

    try:
        if kind is not None:
            kind.run_graph = counted
        yield seen
    finally:
        if kind is not None:
            kind.run_graph = run_graph
        seen.update({node: node.log.replays - count for node, count in before.items() if node.log.replays > count})


def launched(replays: Mapping[Any, int]) -> list[str]:
    """Names of what one call replays, in launch order; empty unless that is a path down a tree without repetitions."""
    after = {getattr(node, "parent", None): node for node in replays}
    path = [node for parent, node in after.items() if parent not in replays][:1]
    while path and path[-1] in after:
        path.append(after[path[-1]])
    is_path = len(path) == len(replays) and all(count == 1 for count in replays.values())
    return [_name(node) for node in path] if is_path else []


def _name(node: Any) -> str:
    """A recording's name; for ours, the report's."""
    function = node.wrapped_function
    if hasattr(node, "log") and hasattr(function.model, "log"):
        return f"{called(function.model.log.record())}, recording {node.log.number}"
    return f"function {function.id.id}, recording {node.id.id}"


def pool_nbytes(managers: Iterable[Any], allocated: bool = False) -> int:
    """Bytes that the graph pools of ``managers`` reserve, or the part of them that is allocated now."""
    pools = {tuple(manager.cuda_graphs_thread_pool) for manager in managers}
    size = "allocated_size" if allocated else "total_size"
    return sum(segment[size] for pool in pools for segment in torch.cuda.memory_snapshot(pool, include_traces=False))
