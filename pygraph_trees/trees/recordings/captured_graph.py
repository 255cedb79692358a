"""The graph that a recording captures: its creation, its nodes, its lanes, and the tensors that its launch uses."""

from __future__ import annotations

import traceback
import warnings
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from pygraph_trees import compat
from pygraph_trees.cuda.driver import driver, why_unusable
from pygraph_trees.cuda.edges import Dependencies, dependencies
from pygraph_trees.cuda.extent import extent
from pygraph_trees.cuda.progress import CudaDevice
from pygraph_trees.edges.branches import Branching, noting
from pygraph_trees.edges.lanes import LANES
from pygraph_trees.edges.streams import Streams
from pygraph_trees.edges.trial import Trial, Tried
from pygraph_trees.errors import DriverError
from pygraph_trees.indirection.hidden_addresses import Surroundings
from pygraph_trees.indirection.inputs import LiveInputs
from pygraph_trees.indirection.inputs import instantiate as instantiate_graph
from pygraph_trees.indirection.live_input import bytes_at
from pygraph_trees.outputs.allocations import constants_of, generated_by_inductor, watching
from pygraph_trees.reasons import Reason, Why

from ..functions.containment import end_allocations
from ..pools import pools
from ..pools.capture_lock import is_captured

if TYPE_CHECKING:
    from pygraph_trees.cuda.graph_nodes import NodeKind

_REGISTERS_GENERATORS = compat.registers_generators()


def kept_graph(inputs: list[Any]) -> Any:
    """A graph whose nodes can be read after capture; the caller must instantiate it."""
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    if _REGISTERS_GENERATORS:
        for value in inputs:
            if isinstance(value, torch.Generator):
                graph.register_generator_state(value)
    return graph


def abandon_capture(node: Any, error: BaseException, stream: torch.cuda.Stream) -> None:
    """Cleans up after a failed capture of a recording, and makes ``stream`` current again.

    If the code does something that a capture does not allow, for example wait for the GPU, torch before 2.13 cannot end
    the capture. Then the capture stream stays current, both allocators keep the pool in use, and generators raise when
    they draw numbers.
    """
    api = driver()
    # Torch warns about an empty graph. ``set_stream`` also changes the current device.
    with suppress(Exception), warnings.catch_warnings(), torch.cuda.device(node.device):
        warnings.simplefilter("ignore")
        torch.cuda.set_stream(stream)
        with torch.cuda.stream(node.stream):
            if api is not None and _is_left(error) and not is_captured():
                api.begin_capture(node.stream.cuda_stream)  # an empty capture, which torch can end
            with suppress(RuntimeError):
                if is_captured():  # the empty one, or one interrupted before torch's `try`
                    node.graph.capture_end()
            if is_captured() and api is not None:  # torch 2.12 only ends captures that it began
                api.end_capture(node.stream.cuda_stream)
                graph = torch.cuda.CUDAGraph()
                graph.capture_begin(capture_error_mode="thread_local")
                graph.capture_end()
        end_allocations(node.device, node.cuda_graphs_pool)


def _is_left(error: BaseException) -> bool:
    """Whether torch failed to end a capture and has not cleaned up."""
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    return compat.leaves_broken_captures() and any(
        frame.f_code.co_name == "capture_end" and frame.f_globals is vars(torch.cuda.graphs) for frame in frames
    )


def captured_nodes() -> Counter[NodeKind]:
    """The nodes captured so far, by kind; empty if the driver cannot tell."""
    with suppress(DriverError):
        if (api := driver()) is not None:
            graph = api.capturing_graph(torch.cuda.current_stream().cuda_stream)
            return Counter() if graph is None else api.count_nodes(graph)
    return Counter()


def branches_noted(
    node: Any, inputs: Sequence[Any], flag: str, lanes: int = 0
) -> AbstractContextManager[Branching | None]:
    """Wraps the capture of a recording, on so many lanes if any; its log gets the facts about branches.

    ``flag``: as :meth:`.Recording._branches_flag` returns it; "forecast" leaves out all that it does not need.
    """
    if flag == "off":
        return nullcontext()
    model = node.wrapped_function.model.model  # the compiled code
    node.log.branches = node.log.why_no_branches = None  # an earlier attempt may have set them
    api, calls, live = driver(), dependencies(), node.live
    if live is not None and live.has_table:
        node.log.why_no_branches = Reason.READS_TABLE()
    elif not generated_by_inductor(model):
        node.log.why_no_branches = Reason.NOT_GENERATED()
    elif api is None or calls is None:
        node.log.why_no_branches = Reason.NO_DRIVER(error=why_unusable() or "libcuda.so.1 cannot be opened")
    else:
        # Managed inputs are in the graph pool, and own memory of outputs, the last inputs, overlaps nothing.
        managed, takes = set(node.cudagraph_managed_idxs), len(inputs) if node.own is None else node.own.takes
        tensors = {i: value for i, value in enumerate(inputs) if isinstance(value, torch.Tensor)}
        elsewhere = [value for i, value in tensors.items() if i < takes and i not in managed]
        elsewhere += constants_of(model)  # with freezing, these are the program's parameters
        streams = None
        if lanes:
            try:
                streams = Streams(api, calls, [torch.cuda.current_stream(), *_lanes(calls, node.device)][:lanes])
            except DriverError as error:
                node.log.why_no_branches = Reason.UNREAD(error=str(error))
                return nullcontext()
        watched = None if streams is None else watching
        asked = _current_stream, None if flag == "forecast" else _allocated
        return noting(node.log, api, calls, *asked, tensors.values(), elsewhere, streams, watched)
    return nullcontext()


def try_lanes(node: Any, branching: Branching) -> None:
    """Begins the trial of a recording's lanes, if its graph, just instantiated, can have other edges."""
    function, live, log, device, pool = node.wrapped_function, node.live, node.log, node.device, node.cuda_graphs_pool
    function_id, lanes, of_function = function.id, function.model.lanes, function.model.log  # these hold no graph
    if branching.chain is None:
        lanes.give_up(function_id, log.why_no_branches or Reason.NO_CHAIN(why="its operations came to one lane"))
        return

    def instantiate(graph: Any) -> None:
        with torch.cuda.device(device):
            instantiate_graph(graph) if live is None else live.instantiate_again(graph)

    def ended(found: Tried | Why) -> None:
        lanes.tried(function_id, log, found)
        if (manager := pools.OWNED.get(pool)) is None:
            return
        if isinstance(found, Why):  # the graph cannot be used any more
            manager.reclaiming.record_again(function_id, found, log.number)
        else:
            manager.free_memory_of_lanes()

    how = CudaDevice(device), instantiate, lambda: of_function.is_tried, ended
    node.graph.replay, log.is_tried = Trial(node.graph, branching.chain, branching.edges, *how), True


@cache
def _lanes(calls: Dependencies, device: int) -> list[torch.cuda.ExternalStream]:
    """The streams of a device's lanes besides the first one: all captures use the same, and nothing else does."""
    with torch.cuda.device(device):
        return [torch.cuda.ExternalStream(calls.make_stream(), device=device) for _ in range(max(LANES) - 1)]


def _current_stream() -> int:
    return int(torch.cuda.current_stream().cuda_stream)


def _allocated() -> int:
    return int(torch.cuda.memory_stats_as_nested_dict()["allocation"]["all"]["allocated"])


def surroundings(node: Any, outputs: Sequence[Any], live: LiveInputs) -> Surroundings:
    """The tensors that a launch reads and writes besides the live inputs; the captured outputs must still exist."""
    mutated, own = set(node.wrapped_function.mutated_input_idxs), {item.index for item in live.items}

    def tensors(indices: set[int]) -> list[torch.Tensor]:
        found = ((index, node.reconstructed_inputs[index]) for index in sorted(indices - own))
        return [_at(node.static_input_data_ptrs[i], value) for i, value in found if is_cuda(value) and _is_plain(value)]

    # These are in the graph pool, where the graph may overwrite them as soon as it has read them.
    in_pool = {*node.cudagraph_managed_idxs, *node._copied_indices()}
    generators = [value for value in node.reconstructed_inputs if isinstance(value, torch.Generator)]
    return Surroundings(
        outputs=[o for i, o in enumerate(outputs) if i not in live.outputs and is_cuda(o) and _is_plain(o)],
        kept=tensors(in_pool | mutated | node._attempts.overwritten),
        written=tensors(mutated),
        generators=[torch.cuda.default_generators[node.device], *generators],
    )


def _at(address: int | None, tensor: torch.Tensor) -> torch.Tensor:
    """A tensor like another one at an address, which it does not own; for None, the other one."""
    if address in (None, tensor.data_ptr()):
        return tensor
    # Upstream makes its tensor where the storage begins. The input may begin later.
    memory = bytes_at(address, extent(tensor) * tensor.element_size(), tensor.device)
    return memory.view(tensor.dtype).as_strided(tensor.shape, tensor.stride())


def is_cuda(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_cuda


def _is_plain(value: torch.Tensor) -> bool:
    return value.layout is torch.strided and value.numel() > 0
