"""Reads what a way's tree managers hold, and which of their recordings one call replays.

The functions accept upstream's recordings and ours. Ours log their replays and copied bytes, and these logs are used.
For upstream's, the bytes follow from the inputs that a replay copies, and replays are counted by wrapping ``run_graph``
for one call. If the order of launches is ambiguous, their names are left out.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from pygraph_trees.compat import lists_copied_inputs
from pygraph_trees.report.text import called


def recordings(managers: Iterable[Any]) -> list[Any]:
    """All recordings in the trees of ``managers``, parents before children."""
    found: list[Any] = []
    for manager in managers:
        pending = [node for nodes in (manager.roots or {}).values() for node in nodes]
        while pending:
            node = pending.pop()
            found.append(node)
            pending += [child for children in node.children.values() for child in children]
    return found


def copied_nbytes(node: Any) -> int:
    """Bytes of GPU inputs that a replay of ``node`` copies into the recording."""
    log = getattr(node, "log", None)
    if log is not None:
        return sum(i.copied_bytes for i in log.record().inputs if i.device is not None and i.device.startswith("cuda"))
    copied: Iterable[int] = node.input_copy_idxs if lists_copied_inputs(node) else node.non_static_input_idx
    return sum(_dense_nbytes(node.reconstructed_inputs[i], node.expanded_dims[i] or ()) for i in copied)


def copied_for_one_call(managers: Iterable[Any]) -> int:
    """Bytes of inputs copied for single calls so far, in addition to those that each replay copies."""
    return sum(node.log.extra_copied_bytes for node in recordings(managers) if hasattr(node, "log"))


def _dense_nbytes(tensor: Any, expanded_dims: Iterable[int]) -> int:
    if not isinstance(tensor, torch.Tensor) or tensor.device.type != "cuda":
        return 0
    elements = tensor.numel()
    for dim in expanded_dims:
        elements //= max(1, tensor.size(dim))
    return elements * tensor.element_size()


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
    """The names of the recordings that one call replays, in launch order.

    Empty if the order is ambiguous: it is known only for a path down a tree without repeated replays.
    """
    after = {getattr(node, "parent", None): node for node in replays}
    node = next((node for parent, node in after.items() if parent not in replays), None)
    path = []
    while node is not None:
        path.append(node)
        node = after.get(node)
    is_path = len(path) == len(replays) and all(count == 1 for count in replays.values())
    return [_name(node) for node in path] if is_path else []


def _name(node: Any) -> str:
    """A recording's name; for ours, the report's."""
    function, log = node.wrapped_function, getattr(node, "log", None)
    if log is not None and hasattr(function.model, "log"):
        return f"{called(function.model.log.record())}, recording {log.number}"
    return f"function {function.id.id}, recording {node.id.id}"


def pool_nbytes(managers: Iterable[Any], allocated: bool = False) -> int:
    """Bytes that the graph pools of ``managers`` reserve, or the part of them that is allocated now."""
    pools = {tuple(manager.cuda_graphs_thread_pool) for manager in managers}
    size = "allocated_size" if allocated else "total_size"
    return sum(segment[size] for pool in pools for segment in torch.cuda.memory_snapshot(pool, include_traces=False))
