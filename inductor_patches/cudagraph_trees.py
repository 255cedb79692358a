"""Patches of ``torch._inductor.cudagraph_trees``: our recording and manager, the entry of functions, the reset of all.

All four names are looked up in the module when they are used, so rebinding them there is enough; thread-local state,
liveness and pool rules and whatever a torch version adds stay upstream's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from .patch import Expectation, Fingerprint, Patch, Rebind

_MODULE = "torch._inductor.cudagraph_trees"
_NODE = (
    "self",
    "wrapped_function",
    "id",
    "parent",
    "inputs",
    "cuda_graphs_pool",
    "device_index",
    "stack_traces",
    "stream",
)
_FUNCTION = ("self", "model", "inputs", "static_input_idxs", "stack_traces", "mode", "constants", "placeholders")


def _recording(upstream: type) -> type:
    from pygraph_trees.trees.recording import Recording

    return Recording


def _manager(upstream: type) -> type:
    from pygraph_trees.trees.manager import Manager

    return Manager


def _cudagraphify_impl(upstream: Callable[..., Any]) -> Callable[..., Any]:
    from pygraph_trees.selection import why_not_graphed
    from pygraph_trees.trees.function import FunctionModel, entered
    from pygraph_trees.trees.saved_tensors import looked_after

    @functools.wraps(upstream)
    def cudagraphify_impl(model: Any, inputs: list[Any], static_input_idxs: Any, *args: Any, **kwargs: Any) -> Any:
        # What comes from Inductor was wrapped at compile time; the rest is from backend="cudagraphs".
        function = FunctionModel.of(model, is_backward=kwargs["is_backward"], is_inference=kwargs["is_inference"])
        reason = why_not_graphed(function.settings)
        if reason is not None:
            function.log.not_graphed(reason)
            return _ungraphed(function, kwargs["device_index"])
        if function.settings.placement != "off":
            # Inductor takes buffers for static; what lies on the CPU is staged at each call, whatever its address. And
            # it says of each partition what the graph writes to, where only code outside of it writes to the CPU's.
            static_input_idxs = [index for index in static_input_idxs if not _is_on_cpu(inputs[index])]
            mutated = kwargs.get("mutated_input_idxs", ())
            kwargs["mutated_input_idxs"] = tuple(index for index in mutated if not _is_on_cpu(inputs[index]))
        run = upstream(function, inputs, static_input_idxs, *args, **kwargs)
        if function.settings.indirection == "off":
            return run
        mutated = set(kwargs.get("mutated_input_idxs", ()))
        run = entered(function, _keeps_writes(run, static_input_idxs, mutated) if mutated else run)
        # Of what comes from Inductor a compiled graph's call sees to it.
        return run if function is model else looked_after(run, is_backward=kwargs["is_backward"])

    return cudagraphify_impl


def _reset_cudagraph_trees(upstream: Callable[[], None]) -> Callable[[], None]:
    from pygraph_trees.indirection.retired import release_retired

    @functools.wraps(upstream)
    def reset_cudagraph_trees() -> None:
        upstream()
        # Managers whose functions went before were not shut down.
        release_retired()

    return reset_cudagraph_trees


def _keeps_writes(run: Any, static_input_idxs: Any, mutated: set[int]) -> Callable[[list[Any]], Any]:
    """``run`` with mutated inputs that come misaligned copied back: upstream clones them and loses what is written.

    Which inputs have to be aligned is asked at the first call with the same integers, as upstream does: before it there
    may be no real ones.
    """
    from torch._inductor.compile_fx import get_input_idxs_to_check
    from torch._inductor.utils import align_inputs_from_check_idxs
    from torch.utils._ordered_set import OrderedSet

    by_integers: dict[tuple[int, ...], Callable[[list[Any]], Any]] = {}

    def call(inputs: list[Any]) -> Any:
        integers = tuple(value for value in inputs if isinstance(value, int))
        aligned = by_integers.get(integers)
        if aligned is None:
            written = [index for index in get_input_idxs_to_check(inputs, static_input_idxs) if index in mutated]
            aligned = by_integers[integers] = align_inputs_from_check_idxs(run, written, OrderedSet(written))
        return aligned(inputs)

    return call


def _is_on_cpu(value: Any) -> bool:
    import torch

    return isinstance(value, torch.Tensor) and value.device.type == "cpu"


def _ungraphed(function: Any, device_index: int) -> Callable[[list[Any]], Any]:
    from torch._inductor import cudagraph_trees

    # The backend expects the forward to have made a manager when its backward cannot be graphed.
    cudagraph_trees.get_manager(device_index)

    def run(inputs: list[Any]) -> Any:
        return function(inputs)

    return run


PATCHES: tuple[Patch, ...] = (
    Rebind(
        feature="trees",
        module=_MODULE,
        name="CUDAGraphNode",
        replace=_recording,
        fingerprints=(
            Fingerprint(
                (2, 11),
                (2, 15),
                (
                    Expectation(
                        _MODULE,
                        "CUDAGraphNode.__init__",
                        _NODE,
                        ("_record", "_allocate_and_copy_recording_inputs", "reconstructed_inputs", "expanded_dims")
                        + (
                            "cudagraph_managed_idxs",
                            "static_input_idxs",
                            "non_static_input_idx",
                            "static_input_data_ptrs",
                        ),
                    ),
                    Expectation(_MODULE, "CUDAGraphNode.__init__", _NODE, ("graph", "replay", "recording_outputs")),
                    Expectation(_MODULE, "CUDAGraphNode._record", ("self", "model", "inputs"), ("model", "graph")),
                    Expectation(
                        _MODULE, "CUDAGraphNode._add_first_outputs", ("self", "outputs"), ("static_output_tensors",)
                    ),
                    Expectation(
                        _MODULE,
                        "CUDAGraphNode._allocate_and_copy_recording_inputs",
                        ("self", "inputs"),
                        ("static_input",),
                    ),
                    Expectation(
                        _MODULE,
                        "CUDAGraphNode.check_invariants",
                        ("self", "inputs"),
                        ("CheckInvariantStatus", "cudagraph_managed_idxs", "expected_dead_indices_before_graph")
                        + ("rerecord_if_static_inputs_change", "static_input_data_ptrs", "preserved_aliased_inputs"),
                    ),
                    Expectation(
                        _MODULE,
                        "CUDAGraphNode.__init__",
                        _NODE,
                        ("_is_cuda_graph_recorded_tensor", "_is_alias_of_live_recorded_tensor")
                        + ("live_indices_after_graph", "expected_dead_indices_after_graph"),
                    ),
                    Expectation(_MODULE, "CUDAGraphNode._is_cuda_graph_recorded_tensor", ("self", "t")),
                    Expectation(
                        _MODULE, "CUDAGraphNode._is_alias_of_live_recorded_tensor", ("self", "t"), ("path_weakrefs",)
                    ),
                    Expectation(_MODULE, "CUDAGraphNode.reconstruct_outputs", ("self",), ("static_output_tensors",)),
                    Expectation(_MODULE, "CUDAGraphNode.run_graph", ("self",), ("graph", "replay")),
                    Expectation(_MODULE, "CUDAGraphNode.run", ("self", "new_inputs"), ("run_graph",)),
                    Expectation(_MODULE, "CUDAGraphNode._copy_inputs_and_remove_from_src", ("self", "dsts", "srcs")),
                    Expectation(_MODULE, "CUDAGraphTreeManager._get_node_id", ("self",), ("CUDAGraphNode",)),
                    Expectation("torch._inductor.output_code", "index_expanded_dims", ("t", "expanded_dims")),
                ),
            ),
        ),
        removable="never: this is the drop-in",
    ),
    Rebind(
        feature="trees",
        module=_MODULE,
        name="CUDAGraphTreeManager",
        replace=_manager,
        fingerprints=tuple(
            Fingerprint(
                since,
                until,
                (
                    Expectation(
                        _MODULE,
                        "CUDAGraphTreeManager.__init__",
                        ("self", "device_index"),
                        ("roots", "ids_to_funcs", "current_node", "num_rerecord", skip_table),
                    ),
                    Expectation(
                        _MODULE,
                        "CUDAGraphTreeManager.record_function",
                        ("self", "new_inputs", "function_id"),
                        ("CUDAGraphNode", "current_node"),
                    ),
                    Expectation(
                        _MODULE,
                        "CUDAGraphTreeManager.run_eager",
                        ("self", "new_inputs", "function_id"),
                        ("CUDAWarmupNode",),
                    ),
                    Expectation(
                        _MODULE,
                        "CUDAGraphTreeManager._update_non_cudagraph_managed_mutation",
                        ("self", "function_id", "inputs"),
                        (skip_table,),
                    ),
                    Expectation(
                        _MODULE,
                        "CUDAGraphTreeManager._run",
                        ("self", "new_inputs", "function_id"),
                        ("_update_non_cudagraph_managed_mutation", "mutated_input_idxs", "check_invariants"),
                    ),
                    Expectation(
                        _MODULE, "CUDAGraphTreeManager.add_function", _FUNCTION, ("WrappedFunction", "partial")
                    ),
                    Expectation(
                        _MODULE,
                        "CUDAGraphTreeManager.execute_node",
                        ("self", "node", "new_inputs"),
                        ("current_node", "path_state", "update_generation", "run"),
                    ),
                    Expectation(
                        _MODULE,
                        "CUDAGraphTreeManager.run",
                        ("self", "new_inputs", "function_id"),
                        ("mode", "id_to_mode", "compile_id", "id_to_compile_id", "_run")
                        + ("running_forwards_with_pending_backwards",),
                    ),
                    Expectation(_MODULE, "CUDAGraphTreeManager.shutdown", ("self",)),
                    Expectation(_MODULE, "CUDAGraphTreeManager.new_func_id", ("self",), ("FunctionID", "func_counter")),
                    Expectation(_MODULE, "CUDAGraphTreeManager.new_graph_id", ("self",), ("GraphID", "graph_counter")),
                    Expectation(
                        _MODULE,
                        "CUDAGraphTreeManager.exceed_rerecord_limit",
                        ("self", "node_id", "function_id"),
                    ),
                    Expectation(_MODULE, "CUDAGraphTreeManager.get_curr_generation", (), ("mark_step_counter",)),
                    Expectation(_MODULE, "CUDAGraphTreeManager.user_invoked_mark_step", (), ("mark_step_counter",)),
                    Expectation(
                        _MODULE,
                        "CUDAGraphTreeManager.can_start_new_generation",
                        ("self",),
                        ("in_new_torch_compile_invocation", "user_invoked_mark_step")
                        + ("running_forwards_with_pending_backwards",),
                    ),
                    Expectation(_MODULE, "CUDAGraphTreeManager.update_generation", ("self",), ("current_gen",)),
                    Expectation(_MODULE, "CUDAGraphTreeManager.try_end_curr_execution", ("self",), ("current_node",)),
                    Expectation(_MODULE, "TreeManagerContainer.get_tree_manager", ("self",), ("CUDAGraphTreeManager",)),
                    Expectation(_MODULE, "get_obj", ("local", "attr_name"), ("_get_obj_in_tls",)),
                ),
            )
            for since, until, skip_table in (
                ((2, 11), (2, 14), "non_cudagraph_managed_mutation_hint"),
                ((2, 15), (2, 15), "skip_cudagraph"),
            )
        ),
        removable="never: this is the drop-in",
    ),
    Rebind(
        feature="trees",
        module=_MODULE,
        name="cudagraphify_impl",
        replace=_cudagraphify_impl,
        fingerprints=(
            Fingerprint(
                (2, 11),
                (2, 15),
                (
                    Expectation(
                        _MODULE, "cudagraphify_impl", ("model", "inputs", "static_input_idxs"), ("cudagraphify",)
                    ),
                    Expectation("torch._dynamo.backends.cudagraphs", "cudagraphs", None, ("cudagraphify_impl",)),
                    Expectation(
                        "torch._inductor.compile_fx", "get_input_idxs_to_check", ("inputs", "static_input_idxs")
                    ),
                    Expectation(
                        "torch._inductor.utils",
                        "align_inputs_from_check_idxs",
                        ("model", "inputs_to_check", "mutated_input_idxs"),
                    ),
                ),
            ),
        ),
        removable="never: this is the drop-in",
    ),
    Rebind(
        feature="trees",
        module=_MODULE,
        name="reset_cudagraph_trees",
        replace=_reset_cudagraph_trees,
        fingerprints=(Fingerprint((2, 11), (2, 15), (Expectation(_MODULE, "reset_cudagraph_trees", ()),)),),
        removable="never: memory of recordings that are gone is given back there",
    ),
)
