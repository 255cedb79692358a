"""Which calls may be recorded with their inputs, and which of these inputs are live.

:class:`Given` holds one call's inputs and the facts that the rules need. Upstream does not graph a function that
mutates a live input, and records again if a static input moves; with inputs given by address, neither is necessary. A
function is not recorded if its writes would be lost, or if an input on the CPU cannot be staged.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch._inductor import cudagraph_trees

from pygraph_trees.compat import lists_groups_of_parameters
from pygraph_trees.cuda.driver import usable_driver
from pygraph_trees.cuda.extent import tensors_with_memory
from pygraph_trees.indirection.routes import why_not_placeholder
from pygraph_trees.indirection.staged_inputs import may_be_staged
from pygraph_trees.reasons import Reason, Why

from ..functions.function import FunctionModel
from ..recordings.recording import Recording
from ..recordings.records import moved

if TYPE_CHECKING:
    from pygraph_trees.indirection.inputs import LiveInputs
    from pygraph_trees.indirection.pool import PoolRanges


def uses_addresses(model: Any) -> bool:
    """Whether recordings of a function are given the addresses of live inputs."""
    return (
        isinstance(model, FunctionModel)
        and model.settings.indirection != "off"
        and cudagraph_trees.CUDAGraphNode is Recording  # the patches may have been removed
        and usable_driver() is not None
    )


def knows_its_writes(model: FunctionModel) -> bool:
    """Whether the function's graph shows all tensors that the function mutates, and they may have other addresses."""
    graph = model.log.graph
    return graph is not None and not graph.rebinds_storage and not model.has_shared_memory


def why_not_staged(model: Any, inputs: list[Any]) -> Why | None:
    """Why an input on the CPU cannot be staged; None if all can. Torch itself does not record inputs on the CPU."""
    if not isinstance(model, FunctionModel) or model.settings.placement == "off":
        return None
    on_cpu = [i for i, value in enumerate(inputs) if isinstance(value, torch.Tensor) and value.is_cpu]
    for index in on_cpu:
        if not uses_addresses(model):
            return Reason.ON_CPU(index=index)
        if index in model.refused:
            return model.refused[index]
        if inputs[index].numel() and not may_be_staged(inputs[index]):
            return Reason.ON_CPU_LARGE(index=index, nbytes=inputs[index].nbytes)
    return None


class Moves:
    """Whether the program keeps replacing parameters: static inputs were found at new addresses at least twice.

    From then on, all static inputs are recorded as live ones: each parameter that moves would need another recording.
    """

    def __init__(self) -> None:
        self._seen: set[int] = set()
        self.go_on = False

    def note(self, addresses: set[int]) -> None:
        """Notes the new addresses of a call's static inputs. Functions that share an input report the same address."""
        self.go_on = self.go_on or bool(self._seen and addresses - self._seen)
        self._seen |= addresses if not self.go_on else set()


@dataclass(frozen=True)
class Given:
    """The inputs of one call of a function, before it is recorded."""

    function: Any  # upstream's WrappedFunction
    inputs: list[Any]
    device: int
    pool: PoolRanges
    is_managed: Callable[[torch.Tensor], bool]  # whether a tensor is an output of a recording on the open path

    def would_lose_writes(self) -> bool:
        """Whether a mutated input that is neither static nor managed cannot be recorded at a placeholder address."""
        with_addresses = uses_addresses(self.function.model)
        return any(
            not (with_addresses and self.is_written_in_place(index))
            for index in self.function.mutated_input_idxs
            if index not in self.function.static_input_idxs and not self.is_managed(self.inputs[index])
        )

    def is_written_in_place(self, index: int) -> bool:
        """Whether a recorded graph's writes to a live input are kept."""
        value = self.inputs[index]
        return knows_its_writes(self.function.model) and (not value.numel() or self._fits_placeholder(value))

    def _fits_placeholder(self, value: torch.Tensor) -> bool:
        return why_not_placeholder(value, self.device, self.pool.holds(value.data_ptr())) is None

    def saved(self, node: Any) -> list[int]:
        """Static inputs of a backward that are live inputs of its forward, whose recording is on the path to ``node``.

        They move from call to call. Upstream's forward instead saves its own copy, whose address does not change.
        """
        on_path: list[LiveInputs] = []
        while isinstance(node, cudagraph_trees.CUDAGraphNode):
            if (live := getattr(node, "live", None)) is not None:
                on_path.append(live)
            node = node.parent
        return [
            index
            for index, value in self._static()
            if any(live.addresses.reaches(value.data_ptr()) for live in on_path) and not self.is_managed(value)
        ]

    def _static(self) -> Iterator[tuple[int, torch.Tensor]]:
        inputs = ((index, self.inputs[index]) for index in self.function.static_input_idxs)
        return ((index, value) for index, value in inputs if isinstance(value, torch.Tensor))

    def _moved_managed(self, recorded: Any) -> set[int]:
        """Managed inputs at other addresses than recorded; torch 2.15 copies them after five recordings."""
        return {
            index
            for index in recorded.cudagraph_managed_idxs
            if index not in self.function.mutated_input_idxs
            and not recorded.preserved_aliased_inputs[index]
            and moved(recorded, self.inputs, index)
        }

    def demoted(self, siblings: Sequence[Any], moves: Moves, node: Any) -> Any:
        """The function with moved inputs live, except mutated ones that cannot be written in place.

        These are static and managed ones whose addresses differ from those in the newest recording here, parameters
        that FSDP2 gathers, and a forward's live inputs that its backward is given. If parameters go on being replaced,
        all static inputs are live. They are recorded again at placeholder addresses, and patched from then on.

        Args:
            siblings: the function's recordings here, the newest last.
            node: for a backward, the recording before it; otherwise None.
        """
        model, static, gathered = self.function.model, list(self._static()), gathered_addresses()
        wanted = self.saved(node)
        wanted += [index for index, value in static if gathered and value.data_ptr() in gathered]
        if siblings:
            recorded = siblings[-1]
            fixed = {index: recorded.static_input_data_ptrs[index] for index in recorded.static_input_idxs}
            found = {index: v.data_ptr() for index, v in static if index in fixed and v.data_ptr() != fixed[index]}
            moves.note({*found.values()})
            wanted += found
            model.moving |= self._moved_managed(recorded)
        if moves.go_on and model.copies_nothing and not model.log.has_collective:  # otherwise they may be copied
            wanted += [index for index, v in static if not self.is_managed(v) and self._fits_placeholder(v)]
        mutated = self.function.mutated_input_idxs
        live = {index for index in wanted if index not in mutated or self.is_written_in_place(index)}
        if not live:
            return self.function
        kept = [index for index in self.function.static_input_idxs if index not in live]
        return dataclasses.replace(self.function, static_input_idxs=kept)


def gathered_addresses() -> frozenset[int]:
    """The addresses of all parameters that FSDP2 has gathered for a module; empty if the process does not use it.

    Each time they are at any free address. Dynamo takes them for static inputs, but a recording would fit only as long
    as the allocator happens to return the same address, so they are live from the first recording on.
    """
    addresses: set[int] = set()
    states = getattr(sys.modules.get("torch.distributed._composable_state"), "_module_state_mapping", {})
    for reference in list(states.values()):
        state = reference()
        several = lists_groups_of_parameters(state)
        groups = state._fsdp_param_groups if several else [getattr(state, "_fsdp_param_group", None)]
        for parameter in [one for group in groups if group is not None for one in group.fsdp_params]:
            found = getattr(parameter, "_unsharded_param", None)  # missing before the first gathering
            inner = tensors_with_memory(getattr(found, "_local_tensor", found))  # of a DTensor
            addresses.update(tensor.data_ptr() for tensor in inner if tensor.untyped_storage().nbytes())
    return frozenset(addresses)
