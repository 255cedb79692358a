"""Every question about the version of torch, one function each.

A function checks for a feature, never for a version; a comment names the version that added or removed it. A question
without a parameter has one answer per process, even while patches are on. Torch is imported when a question is asked.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from typing import Any


def has_trees_per_thread() -> bool:
    """Whether each thread has its own trees for a function."""
    cudagraphify = inspect.unwrap(_torch("_inductor.compile_fx").cudagraphify)
    return "thread_local" in cudagraphify.__code__.co_cellvars  # since 2.13


def has_capture_lock() -> bool:
    """Whether captures hold a lock, because another thread's wait for the device breaks them."""
    return hasattr(_torch("_inductor.cudagraph_trees"), "graph_capture_lock")  # since 2.13


def leaves_broken_captures() -> bool:
    """Whether ``capture_end`` of a graph that could not be captured leaves its pool and generators in use."""
    # 2.13's C++ ends them.
    return not has_capture_lock()  # up to 2.12


def registers_generators() -> bool:
    """Whether a node registers generators with its graph, because a capture does not find them."""
    return _is_named("register_generator_state", "CUDAGraphNode", "__init__")  # up to 2.13


def clones_live_outputs() -> bool:
    """Whether a manager may clone outputs that are alive at a new step."""
    return _is_named("has_live_user_visible_output_cloning", "CUDAGraphTreeManager", "__init__")  # since 2.14


def has_skip_table() -> bool:
    """Whether ``non_cudagraph_managed_mutation_hint`` of a manager is named ``skip_cudagraph``."""
    return _is_named("skip_cudagraph", "CUDAGraphTreeManager", "__init__")  # since 2.15


def checks_deaths_after_copies() -> bool:
    """Whether ``run`` checks that inputs are dead after it has copied them, and not before."""
    return _is_named("expected_dead_indices_after_graph", "CUDAGraphNode", "run")  # since 2.15


def lists_static_tensors(node: Any) -> bool:
    """Whether a recording has a list of the static inputs that are tensors."""
    return hasattr(node, "tensor_static_input_idxs")  # since 2.12


def lists_copied_inputs(node: Any) -> bool:
    """Whether a recording has a list of the inputs that it copies; otherwise it copies all that are not static."""
    return hasattr(node, "input_copy_idxs")  # since 2.15


def lists_groups_of_parameters(state: Any) -> bool:
    """Whether FSDP2's state of a module has a list of groups of parameters; otherwise it has one group or None."""
    return hasattr(state, "_fsdp_param_groups")  # since 2.12


def is_kernel_free(function: Any) -> bool:
    """Whether a wrapped function is recorded without a graph, since it launches no kernel."""
    return getattr(function, "kernel_free_cudagraph", False)  # since 2.14


def has_size_hint() -> bool:
    """Whether the example of a symbolic number is ``size_hint``, and not ``optimization_hint``."""
    return hasattr(_torch("_inductor.sizevars").SizeVarAllocator, "size_hint")  # up to 2.11


def marks_traces_by_thread() -> bool:
    """Whether each thread has a mark of its own while FX traces."""
    return hasattr(_torch("fx._symbolic_trace"), "_is_fx_tracing_tls")  # since 2.14


def are_call_marks_wrapped() -> bool:
    """Whether the marks around a compiled function's inputs go through ``torch._dynamo.disable``."""
    return hasattr(_torch("_dynamo.utils").record_pregraph_bytecode_enter, "__wrapped__")  # up to 2.14


def dynamic_mark() -> str:
    """The attribute in which compiled code notes a tensor's dynamic dimensions. No guard reads it."""
    wrappers = _torch("_functorch._aot_autograd.runtime_wrappers")
    has_own = hasattr(wrappers, "mark_dynamo_propagated_dynamic_indices")  # since 2.13
    return "_dynamo_propagated_dynamic_indices" if has_own else "_dynamo_weak_dynamic_indices"


def unwraps_in_python() -> bool:
    """Whether torch looks for dead functorch wrappers among the arguments of autograd functions in Python."""
    return not hasattr(_torch("_C")._functorch, "unwrap_dead_wrappers")  # up to 2.13


def knows_saved_inputs() -> bool:
    """Whether AOTAutograd knows which saved tensors are a function's inputs, and does not detach them."""
    fields = dataclasses.fields(_torch("_functorch._aot_autograd.schemas").ViewAndMutationMeta)
    return "saved_tensor_is_graph_input" in {field.name for field in fields}  # since 2.14


def has_context_overrides() -> bool:
    """Whether the override of a configuration entry is a context variable, and not an attribute."""
    fields = {field.name: field for field in dataclasses.fields(_torch("utils._config_module")._ConfigEntry)}
    return fields["user_override"].default is dataclasses.MISSING  # since 2.12


def has_dirty_variables() -> bool:
    """Whether context variables, and not an attribute, tell that a configuration's hash and dictionary are outdated."""
    return hasattr(_torch("_inductor.config"), "_hash_dirty_var")  # since 2.13


def has_replay_hooks() -> bool:
    """Whether a graph calls hooks of the program when it is replayed."""
    return hasattr(_torch("cuda").CUDAGraph, "register_replay_start_hook")  # since 2.14


def graph_policy(config: Any) -> Any:
    """The program's policy for making CUDA graphs; None without."""
    return getattr(config, "cudagraph_policy", None)  # since 2.12


def has_plugins(autotuner: Any) -> bool:
    """Whether an autotuner has plugins, which take part in its launches."""
    return bool(getattr(autotuner, "_plugins", ()))  # since 2.12


def is_for_any_device(autotuner: Any) -> bool:
    """Whether a kernel is compiled for the device on which it is launched, not for a fixed one."""
    return autotuner.triton_meta["device"] is None  # since 2.14


def _torch(module: str) -> Any:
    return importlib.import_module(f"torch.{module}")


def _is_named(name: str, kind: str, method: str) -> bool:
    """Whether a method of one of torch's classes uses a name, also while a class of ours replaces torch's."""
    bases = getattr(_torch("_inductor.cudagraph_trees"), kind).__mro__
    upstream = next(base for base in bases if not base.__module__.startswith("pygraph_trees."))
    return name in getattr(upstream, method).__code__.co_names
