"""The table of patches: what is replaced in torch, and by what; comments say what would make a patch unnecessary.

A replacement is imported from ``pygraph_trees`` only when its patch is applied; this module needs neither torch nor
``pygraph_trees``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .config import Flags
from .patch import IfThere, OnDemand, Patch, Rebind, made_by


def _placing(upstream: Callable[..., Any]) -> Callable[..., Any]:
    from pygraph_trees.placement import placing

    return placing(upstream, _has_addresses)


def _has_addresses() -> bool:
    """Whether recordings are given addresses, or would be on a fake GPU; artifacts depend on this rule."""
    import torch
    from torch._inductor import cudagraph_trees

    from pygraph_trees.cuda.driver import usable_driver
    from pygraph_trees.fake_gpu.presence import is_absent
    from pygraph_trees.trees.recordings.recording import Recording

    if cudagraph_trees.CUDAGraphNode is not Recording:
        return False
    if is_absent():
        return True
    # Asking for the driver may warn, which says nothing to programs without a GPU.
    return torch.cuda.is_available() and usable_driver() is not None


# By feature, module of torch and name in the module; the patches of a feature are applied in this order. A replacement
# is the name of a class, or of a function that takes upstream's object and returns the one to use instead; or that
# function itself. Patches without "until" are the drop-in.
_REBOUND: dict[str, dict[str, dict[str, str | Callable[[Any], Any]]]] = {
    "flags": {
        # Flags in `options=` are checked before Inductor applies any option, so a wrong value raises in
        # `torch.compile` and not at the function's first call. Until torch registers config entries from outside.
        "torch": {"_TorchCompileInductorWrapper.apply_options": "pygraph_trees.settings.checking_options"},
    },
    "trees": {
        # Upstream looks all names up in the module when it uses them, so rebinding them there is enough. Thread-local
        # state, the rules of liveness and pools, and additions of a torch version stay upstream's. Containers: until
        # their locks are reentrant, or not held while a manager is made.
        "torch._inductor.cudagraph_trees": {
            "CUDAGraphNode": "pygraph_trees.trees.recordings.recording.Recording",
            "CUDAGraphTreeManager": "pygraph_trees.trees.managers.manager.Manager",
            "StorageWeakRefWrapper": "pygraph_trees.trees.pools.liveness.OutputReference",
            "TreeManagerContainer": "pygraph_trees.trees.hooks.manager_container.ManagerContainer",
            "get_container": "pygraph_trees.trees.hooks.manager_container.get_container",
            "cudagraphify_impl": "pygraph_trees.trees.hooks.entry_points.cudagraphify_impl",
            "reset_cudagraph_trees": "pygraph_trees.trees.hooks.entry_points.reset_cudagraph_trees",
        },
        # Every whole graph and every partition goes through this function.
        "torch._inductor.compile_fx": {
            "cudagraphify": "pygraph_trees.trees.hooks.entry_points.cudagraphify",
            # What cannot be compiled as placed, or would lose values, is compiled again in another way.
            "fx_codegen_and_compile": "pygraph_trees.trees.hooks.compiling.trying",
        },
        # Until torch allocates what several partitions write to once for all of them.
        "torch._inductor.scheduler": {
            "Scheduler.get_graph_partition_signature": "pygraph_trees.trees.hooks.compiling.keeping_whole"
        },
        # When a compiled graph is installed, it is decided whether it is graphed. A call tries the fast path first.
        # Until torch does not assert that the forward of a backward that is not graphed made a manager.
        "torch._inductor.output_code": {
            "CompiledFxGraph.post_compile": "pygraph_trees.trees.hooks.entry_points.putting_to_use",
            "maybe_handle_backward_generation": "pygraph_trees.trees.hooks.entry_points.of_ungraphed_backward",
            "CompiledFxGraph.__call__": "pygraph_trees.trees.hooks.entry_points.calling",
        },
        # A compilation leaves AOTAutograd's metadata in the tracing context. For a program that comes from
        # AOTAutograd's cache, only the cache's entry has it, until the context tells the same; it is kept while the
        # program's graphs are installed.
        "torch._functorch._aot_autograd.aot_autograd_result": {
            "GenericAOTAutogradResult.wrap_post_compile": "pygraph_trees.trees.hooks.entry_points.loading",
        },
        # Until torch does not assert that a recording is open, an optimizer's step cannot be compiled after a backward
        # that ran un-graphed. If none is open, the tensor alone decides whether a gradient is static.
        "torch._dynamo.variables.optimizer": {
            "_is_static_for_cudagraphs": "pygraph_trees.trees.hooks.entry_points.is_static_for_cudagraphs",
        },
        # Replays overwrite no memory that others may still use. Torch's allocator looks at the streams that a program
        # records for a tensor only when it frees the tensor's memory, and replays write to memory that is not freed:
        # own memory of outputs is then not written again, and the next replay of a graph pool waits for the stream.
        # Until torch tells which streams use a storage. Outputs leave the pool before another process or a lazy clone
        # shares their memory, until torch does not share such memory.
        "torch": {
            "Tensor.record_stream": "pygraph_trees.trees.hooks.entry_points.record_stream",
            "UntypedStorage._share_cuda_": "pygraph_trees.trees.hooks.entry_points.outside_of_pools",
            "_lazy_clone": "pygraph_trees.trees.hooks.entry_points.outside_of_pools",
            "Tensor._lazy_clone": "pygraph_trees.trees.hooks.entry_points.outside_of_pools",
        },
        # Operations that share no memory can run side by side, until Inductor plans memory for several streams.
        "torch._inductor.codegen.wrapper": {
            "MemoryPlanningState.__contains__": "pygraph_trees.edges.buffers.kept_apart"
        },
        # A graph that the program captures may read outputs of recordings, and holds their addresses: outputs in the
        # graph pool, which later steps overwrite, are moved out before. Until torch tells when a capture begins. Before
        # torch 2.13, the allocator treats a program's failed capture as unfinished, and later recordings may crash.
        "torch.cuda": {
            "CUDAGraph.capture_begin": "pygraph_trees.trees.hooks.entry_points.capture_begin",
            "CUDAGraph.capture_end": "pygraph_trees.trees.hooks.entry_points.capture_end",
        },
        # A pool of the program would take what is allocated for graphs, until the innermost pool does, and torch tells
        # which are used.
        "torch.cuda.memory": {
            "_cuda_beginAllocateCurrentThreadToPool": "pygraph_trees.trees.pools.program_pools.begins",
            "_cuda_endAllocateToPool": "pygraph_trees.trees.pools.program_pools.ends",
        },
    },
    # Until torch reports why it splits a graph as data.
    "report": {
        # A graph break is noted with its line; torch's counters have only its kind.
        "torch._dynamo.symbolic_convert": {
            "InstructionTranslatorBase.log_graph_break": "pygraph_trees.report.breaks.noting",
        },
        # The partitions of a graph are described.
        "torch._inductor.scheduler": {
            "Scheduler.graph_partition": "pygraph_trees.report.compiled.describing_partitions",
        },
        # A new graph is described, and its saved tensors are noted.
        "torch._inductor.output_code": {
            "CompiledFxGraph.__init__": "pygraph_trees.trees.hooks.saved_tensors.describing",
        },
    },
    "calls": {
        # The profiler's marks around the code that gathers a compiled function's inputs. Each call makes them, even if
        # no profiler runs; the replacements then do nothing. Until torch 2.15, which no longer wraps them in
        # `torch._dynamo.disable`, so they stay upstream's there.
        "torch._dynamo.utils": {
            "record_pregraph_bytecode_enter": "pygraph_trees.trees.hooks.host_work.enter",
            "record_pregraph_bytecode_exit": "pygraph_trees.trees.hooks.host_work.exit",
        },
        # Torch searches the arguments of each autograd function, and so all parameters of a compiled training step.
        # Until torch 2.14, which searches in C++, so its function stays there.
        "torch._functorch.utils": {"unwrap_dead_wrappers": "pygraph_trees.trees.hooks.host_work.unwrapping"},
        # What is shorter at run time is decided for each function while it is compiled. Until torch's engine
        # accumulates many gradients in one step; the same holds for the feature "backward".
        "torch._functorch._aot_autograd.runtime_wrappers": {
            "RuntimeWrapper.post_compile": "pygraph_trees.trees.hooks.backward_edges.marking",
        },
    },
    # Until torch itself moves CPU work for the GPU, except for returned tensors.
    "placement": {
        # The passes look the name up in the module when they run. Placement gets upstream's pass, and runs it if
        # placement itself does nothing.
        "torch._inductor.fx_passes.post_grad": {"move_constructors_to_gpu": _placing},
        # Nested passes over graphs are counted, so placement recognizes a graph inside another one. `compile_fx`
        # compiles without CUDA graphs if the flags say so; torch has no flag for that.
        "torch._inductor.compile_fx": {
            "_recursive_post_grad_passes": "pygraph_trees.placement.counting_depth",
            "compile_fx": "pygraph_trees.selection.functions.leaving_graphs_out",
        },
        # Kernels that read values of the CPU are kept out of CUDA graphs. The parts of a foreach kernel run in no
        # order, so none may read what another one computes: until torch does not fuse a producer into such a kernel.
        "torch._inductor.scheduler": {
            "Scheduler.should_partition": "pygraph_trees.placement.scheduled.keeping_outside",
            "ForeachKernelSchedulerNode.get_consumer_subnode_for": (
                "pygraph_trees.placement.scheduled.keeping_producers_outside"
            ),
        },
    },
}

_EDGES = "pygraph_trees.trees.hooks.backward_edges"
_DIRECT = "pygraph_trees.trees.hooks.direct_calls"

PATCHES: tuple[Patch, ...] = (
    Flags("flags", "torch._inductor.config", "triton"),  # until torch registers config entries from outside
    *(
        Rebind(feature, module, name, made_by(replace) if isinstance(replace, str) else replace)
        for feature, modules in _REBOUND.items()
        for module, names in modules.items()
        for name, replace in names.items()
    ),
    # Compiled functions accumulate gradients themselves. Torch has the function under two names; `make_fx` rebinds both
    # for a time, and then binds both to what the second one was. They are upstream's until a function needs them.
    *(
        OnDemand("backward", module, "_engine_run_backward", made_by(f"{_EDGES}.taking"), made_by(f"{_EDGES}.offer"))
        for module in ("torch.autograd", "torch.autograd.graph")
    ),
    # Compiled functions are called without Dynamo's guards if nothing that they read has changed. Here torch makes its
    # functions around compiled ones. Until Dynamo's guards take no longer than comparing what they read.
    OnDemand(
        *("entry", "torch._dynamo.eval_frame", "_TorchDynamoContext.__call__"),
        replace=made_by(f"{_DIRECT}.entering"),
        offer=made_by(f"{_DIRECT}.offer"),
    ),
    # Torch looks at each tensor that a compiled function saves, until it does so in C++. Torch 2.11 does so in the
    # function's forward, which no other code can reach; it stays as it is.
    IfThere(
        *("saving", "torch._functorch._aot_autograd.runtime_wrappers", "_AutogradSavedState.save_from_forward"),
        replace=made_by("pygraph_trees.trees.hooks.host_work.saving"),
    ),
    # All of Inductor's Triton kernels are launched here. It is rebound only while a function is warmed up, or captured
    # with a table of addresses (`pygraph_trees.indirection.table.launches`); at all other times it is upstream's.
    OnDemand(
        *("table", "torch._inductor.runtime.triton_heuristics", "CachingAutotuner.run"),
        replace=made_by("pygraph_trees.indirection.table.launches.watched"),
        offer=made_by("pygraph_trees.indirection.table.launches.offer"),
    ),
)
