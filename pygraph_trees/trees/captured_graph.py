"""The graph that a recording captures: one whose nodes can be read, what it holds so far, and what its launch touches.

:func:`kept_graph` makes the graph, which we instantiate. :func:`captured_nodes` counts nodes while the capture is under
way and gives no counts if the driver cannot tell. :func:`surroundings` lists the tensors that a launch reads and writes
beside the live inputs, for a rehearsal of graphs whose kernels may hide addresses.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import torch

from pygraph_trees import compat
from pygraph_trees.cuda.driver import driver
from pygraph_trees.errors import DriverError
from pygraph_trees.indirection.hidden_addresses import Surroundings

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from pygraph_trees.cuda.graph_nodes import NodeKind
    from pygraph_trees.indirection.inputs import LiveInputs

_REGISTERS_GENERATORS = compat.registers_generators()


def kept_graph(inputs: list[Any]) -> Any:
    """A graph whose nodes can be read after capture; it is instantiated by us."""
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    if _REGISTERS_GENERATORS:
        for value in inputs:
            if isinstance(value, torch.Generator):
                graph.register_generator_state(value)
    return graph


def captured_nodes() -> Counter[NodeKind]:
    """What has been captured so far; nothing if the driver cannot tell."""
    api = driver()
    try:
        graph = None if api is None else api.capturing_graph(torch.cuda.current_stream().cuda_stream)
        return Counter() if api is None or graph is None else api.count_nodes(graph)
    except DriverError:
        return Counter()


def surroundings(node: Any, outputs: Sequence[Any], live: LiveInputs, copied: Collection[int]) -> Surroundings:
    """What a launch reads and writes beside the live inputs, while the outputs of the capture are there.

    Args:
        node: the recording, of which upstream's attributes are read.
        copied: the indices of the inputs that upstream copies.
    """
    mutated, own = set(node.wrapped_function.mutated_input_idxs), {item.index for item in live.items}

    def tensors(indices: set[int]) -> list[torch.Tensor]:
        found = (node.reconstructed_inputs[index] for index in sorted(indices - own))
        return [value for value in found if is_cuda(value) and _is_plain(value)]

    # In the graph pool, where the graph may put something else as soon as it has read them.
    in_pool = {*node.cudagraph_managed_idxs, *copied}
    generators = [value for value in node.reconstructed_inputs if isinstance(value, torch.Generator)]
    return Surroundings(
        outputs=[o for i, o in enumerate(outputs) if i not in live.outputs and is_cuda(o) and _is_plain(o)],
        kept=tensors(in_pool | mutated),
        written=tensors(mutated),
        generators=[torch.cuda.default_generators[node.device], *generators],
    )


def is_cuda(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_cuda


def _is_plain(value: torch.Tensor) -> bool:
    """Whether its elements are what lies in memory."""
    return value.layout is torch.strided and value.numel() > 0
