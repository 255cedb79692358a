"""The recordings of a tree manager as plain facts.

``tree_facts`` reads a manager of upstream's class, or of a subclass, through upstream's attributes. It returns facts
that are equal in every run of a program: structure, kinds of inputs and outputs, liveness, counters, the size of the
memory pool, and which outputs share a block of the pool, but no addresses.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

from transcript import normalise


class Facts(dict[str, Any]):
    """Facts by name, which are attributes too."""

    def __getattr__(self, name: str) -> Any:
        if name not in self:
            raise AttributeError(name)
        return self[name]


class NodeFacts(Facts):
    """One recording and its successors."""

    def walk(self) -> Iterator[NodeFacts]:
        yield self
        for child in self.children:
            yield from child.walk()

    @property
    def shape(self) -> tuple[Any, ...]:
        """Function numbers only: (function, (shapes of the children))."""
        return (self.function, tuple(child.shape for child in self.children))


class TreeFacts(Facts):
    """A manager with all its recordings."""

    @property
    def nodes(self) -> list[NodeFacts]:
        return [node for root in self.roots for node in root.walk()]

    @property
    def recordings(self) -> int:
        return len(self.nodes)

    @property
    def shape(self) -> tuple[Any, ...]:
        return tuple(root.shape for root in self.roots)

    @property
    def depth(self) -> int:
        def below(node: NodeFacts) -> int:
            return 1 + max((below(child) for child in node.children), default=0)

        return max((below(root) for root in self.roots), default=0)


def tree_nodes(manager: Any) -> Iterator[Any]:
    """Every recording of ``manager``, parents first; none after a shutdown."""
    pending = [node for nodes in (manager.roots or {}).values() for node in nodes]
    while pending:
        node = pending.pop(0)
        yield node
        pending.extend(child for children in node.children.values() for child in children)


def pool_blocks(pool: Any) -> tuple[int, int, int]:
    """(bytes of all segments, bytes of blocks in use, number of blocks in use) of a graph pool."""
    from torch._inductor.cudagraph_trees import get_cudagraph_segments

    segments = get_cudagraph_segments(tuple(pool))
    used = [block for segment in segments for block in segment["blocks"] if block["state"] == "active_allocated"]
    return sum(segment["total_size"] for segment in segments), sum(block["size"] for block in used), len(used)


def tree_facts(manager: Any, container: Any) -> TreeFacts:
    current = manager.current_node
    pool_bytes, active_bytes, active_blocks = pool_blocks(manager.cuda_graphs_thread_pool)
    block_numbers: dict[int, int] = {}
    number_of = functools.partial(_number, block_numbers)
    return TreeFacts(
        roots=tuple(_node(node, number_of) for nodes in (manager.roots or {}).values() for node in nodes),
        functions=len(manager.ids_to_funcs),
        modes=tuple(mode.name for _, mode in sorted(manager.id_to_mode.items(), key=lambda item: item[0].id)),
        warmed_up=tuple(sorted(function.id for function in manager.warmed_up_functions)),
        warned=tuple(sorted(function.id for function in manager.warned_functions)),
        warned_mutation=tuple(sorted(function.id for function in manager.warned_mutation)),
        # (node, function, True) for a function that runs un-graphed
        mutation_hints=_by_node(_mutation_hints(manager)),
        rerecorded=_by_node(_without_zeros(manager.num_rerecord)),
        # Recordings that were made because no existing one fitted.
        fail_count=manager.debug_fail_counter,
        checkpoint_count=manager.debug_checkpointing_counter,
        graph_counter=repr(manager.graph_counter),
        warmup_counter=repr(manager.warmup_node_counter),
        current=None if current is None else f"{_kind_of_node(current)} {current.id.id}",
        state=manager.path_state.name,
        mode=None if manager.mode is None else manager.mode.name,
        pending_backwards=manager.running_forwards_with_pending_backwards,
        generation_lag=manager.get_curr_generation() - manager.current_gen,
        live_functions=container.live_cudagraphify_fns,
        pool_bytes=pool_bytes,
        pool_active_bytes=active_bytes,
        pool_active_blocks=active_blocks,
    )


def _mutation_hints(manager: Any) -> Any:
    """By node and function, True if the function runs un-graphed; torch 2.15 renamed the table.

    Upstream notes False only when it happens to look.
    """
    renamed = hasattr(manager, "skip_cudagraph")
    table = manager.skip_cudagraph if renamed else manager.non_cudagraph_managed_mutation_hint
    return _without_zeros(table)


def _without_zeros(table: Any) -> Any:
    """A two-level table without the zeros that each look-up leaves; the number of look-ups varies."""
    return {node: {function: value or None for function, value in values.items()} for node, values in table.items()}


def _kind_of_node(node: Any) -> str:
    return "recording" if hasattr(node, "children") else "warmup"


def _number(numbers: dict[int, int], address: int) -> int:
    return numbers.setdefault(address, len(numbers))


def _by_node(table: Any) -> tuple[Any, ...]:
    """A two-level table by node and function as sorted (node, function, value); entries without content left out."""
    rows = [
        (None if node is None else node.id, function.id, value)
        for node, values in table.items()
        for function, value in values.items()
        if value is not None
    ]
    return tuple(sorted(rows, key=repr))


def _frozen(value: Any) -> Any:
    return tuple(_frozen(member) for member in value) if isinstance(value, (list, tuple)) else value


def _node(node: Any, number_of: Any) -> NodeFacts:
    function = node.wrapped_function
    return NodeFacts(
        function=function.id.id,
        graph=node.id.id,
        static_inputs=tuple(sorted(node.static_input_idxs)),
        # Static and not managed.
        persistent_inputs=tuple(node.non_managed_static_input_idxs),
        managed_inputs=tuple(node.cudagraph_managed_idxs),
        copied_inputs=tuple(node.non_static_input_idx),
        mutated_inputs=tuple(sorted(function.mutated_input_idxs)),
        constants=len(function.constants),
        managed_refs=_frozen(node.live_cudagraph_managed_path_refs),
        preserved_inputs=tuple(node.preserved_aliased_inputs),
        expanded_dims=_frozen(node.expanded_dims),
        outputs=tuple(_output(node, index, number_of) for index in range(len(node.outputs_metadata))),
        liveness_before=_frozen(node.recorded_liveness_before_graph),
        liveness_after=_frozen(node.recorded_liveness_after_graph),
        dead_before=_frozen(node.expected_dead_indices_before_graph),
        stack_traces=tuple(None if trace is None else normalise(trace) for trace in node.stack_traces or ()),
        children=tuple(_node(child, number_of) for children in node.children.values() for child in children),
    )


def _output(node: Any, index: int, number_of: Any) -> Facts:
    """One output of a recording; ``kind`` tells where its storage at a replay comes from."""
    metadata = node.outputs_metadata[index]
    if not isinstance(metadata, dict):
        return Facts(kind="none" if metadata is None else f"int {metadata}")
    static = node.static_output_tensors[index] is not None
    aliased = getattr(node.output_storage_alias[index], "index", None)
    if static:
        kind = "static"
    elif isinstance(aliased, tuple):
        kind = f"prior {aliased}"  # (depth, output)
    else:
        kind = "new" if aliased is None else f"with output {aliased}"
    cached = node.cached_tensor_outputs
    return Facts(
        kind=kind,
        size=tuple(metadata["size"]),
        stride=tuple(metadata["stride"]),
        storage_offset=metadata["storage_offset"],
        dtype=str(metadata["dtype"]),
        nbytes=metadata["nbytes"],
        block=-1 if static else number_of(metadata["data_ptr"]),  # outputs with the same number share an address
        unaliased=node.unaliased_in_all_paths[index],
        cached=bool(cached) and cached[index] is not None,
    )


def class_problems(manager: Any, ours: bool) -> list[str]:
    """Reasons why the manager and its recordings are not all of our classes (``ours``) or of upstream's."""
    objects = [manager, *tree_nodes(manager)] if manager is not None else []
    wanted = ("pygraph_trees.trees.managers.manager.Manager", "pygraph_trees.trees.recordings.recording.Recording")
    problems: list[str] = []
    for each in objects:
        name = f"{type(each).__module__}.{type(each).__qualname__}"
        is_ours = any(f"{base.__module__}.{base.__qualname__}" in wanted for base in type(each).__mro__)
        if is_ours != ours:
            problems.append(f"{name} where {'ours' if ours else 'upstream'} should be")
    return problems


def device_manager(device_index: int) -> tuple[Any, Any]:
    """(manager, container) of this thread for a device; no manager if nothing was captured yet."""
    import torch._inductor.cudagraph_trees as trees

    manager = trees.get_manager(device_index, create_if_none_exists=False)
    return manager, trees.get_container(device_index)
