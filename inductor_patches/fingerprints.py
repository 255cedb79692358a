"""The fingerprints of torch's definitions on which patches rely: a table with a row for each definition.

:data:`FINGERPRINTS` has the rows of each target as :class:`Fingerprint` records. Reading the table needs no torch.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

Version = tuple[int, int]  # major and minor number

_SUPPORTED = (2, 11), (2, 15)

# A block for targets that rely on the same definitions: a module and names in it. Rows are of that module, or after
# "in" of another one. A row: the torch versions if they are not all that are supported, its module if it is alone with
# another one, the definition with its leading parameters (without parentheses none are compared), and after a colon the
# names that its body uses. A deeper indent continues a row.
_TABLE = """
torch._inductor.config triton
  in torch.utils._config_module
    2.11 _ConfigEntry.__init__(self, config): env_value_default
    2.12-2.15 _ConfigEntry.__init__(self, config, name): env_value_default
    ConfigModule.__setattr__(self, name, value): _config user_override
    ConfigModule.__getattr__(self, name): user_override env_value_default
    ConfigModule._get_dict(self, ignored_keys, ignored_prefixes): _config
    ConfigModule.save_config_portable: _cache_config_ignore_prefix
    _Config: value_type

torch _TorchCompileInductorWrapper.apply_options
    _TorchCompileInductorWrapper.apply_options(self, options): config

torch._inductor.cudagraph_trees CUDAGraphNode
    CUDAGraphNode.__init__(self, wrapped_function, id, parent, inputs, cuda_graphs_pool, device_index, stack_traces,
        stream): _record _allocate_and_copy_recording_inputs reconstructed_inputs expanded_dims cudagraph_managed_idxs
        static_input_idxs non_static_input_idx static_input_data_ptrs graph replay recording_outputs
        _is_cuda_graph_recorded_tensor _is_alias_of_live_recorded_tensor live_indices_after_graph
        expected_dead_indices_after_graph
    CUDAGraphNode._record(self, model, inputs): model graph
    CUDAGraphNode._add_first_outputs(self, outputs): static_output_tensors recorded_liveness_after_graph
        checkpointed_caching_state
    CUDAGraphNode._allocate_and_copy_recording_inputs(self, inputs): static_input
    CUDAGraphNode.check_invariants(self, inputs): CheckInvariantStatus cudagraph_managed_idxs
        expected_dead_indices_before_graph rerecord_if_static_inputs_change static_input_data_ptrs
        preserved_aliased_inputs
    CUDAGraphNode._tensor_metadata(x, ignore_storage_offset): untyped_storage data_ptr storage_offset
    CUDAGraphNode._is_cuda_graph_recorded_tensor(self, t)
    CUDAGraphNode._is_alias_of_live_recorded_tensor(self, t): path_weakrefs
    CUDAGraphNode.reconstruct_outputs(self): static_output_tensors
    CUDAGraphNode.run_graph(self): graph replay
    CUDAGraphNode.run(self, new_inputs): run_graph
    CUDAGraphNode._copy_inputs_and_remove_from_src(self, dsts, srcs)
    CUDAGraphTreeManager._get_node_id(self): CUDAGraphNode
    torch._inductor.output_code index_expanded_dims(t, expanded_dims)

torch._inductor.cudagraph_trees CUDAGraphTreeManager
    2.11-2.14 CUDAGraphTreeManager.__init__(self, device_index): roots ids_to_funcs current_node num_rerecord
        non_cudagraph_managed_mutation_hint
    2.15 CUDAGraphTreeManager.__init__(self, device_index): roots ids_to_funcs current_node num_rerecord skip_cudagraph
    CUDAGraphTreeManager.record_function(self, new_inputs, function_id): CUDAGraphNode current_node
    CUDAGraphTreeManager.run_eager(self, new_inputs, function_id): CUDAWarmupNode
    2.11-2.14 CUDAGraphTreeManager._update_non_cudagraph_managed_mutation(self, function_id, inputs):
        non_cudagraph_managed_mutation_hint
    2.15 CUDAGraphTreeManager._update_non_cudagraph_managed_mutation(self, function_id, inputs): skip_cudagraph
    CUDAGraphTreeManager._run(self, new_inputs, function_id): _update_non_cudagraph_managed_mutation mutated_input_idxs
        check_invariants
    CUDAGraphTreeManager.add_function(self, model, inputs, static_input_idxs, stack_traces, mode, constants,
        placeholders): WrappedFunction partial
    CUDAGraphTreeManager.execute_node(self, node, new_inputs): current_node path_state update_generation run
    CUDAGraphTreeManager.run(self, new_inputs, function_id): mode id_to_mode compile_id id_to_compile_id _run
        running_forwards_with_pending_backwards
    CUDAGraphTreeManager.shutdown(self)
    CUDAGraphTreeManager.new_func_id(self): FunctionID func_counter
    CUDAGraphTreeManager.new_graph_id(self): GraphID graph_counter
    CUDAGraphTreeManager.exceed_rerecord_limit(self, node_id, function_id)
    CUDAGraphTreeManager.get_curr_generation(): mark_step_counter
    CUDAGraphTreeManager.user_invoked_mark_step(): mark_step_counter
    CUDAGraphTreeManager.can_start_new_generation(self): in_new_torch_compile_invocation user_invoked_mark_step
        running_forwards_with_pending_backwards
    CUDAGraphTreeManager.update_generation(self): current_gen
    CUDAGraphTreeManager.try_end_curr_execution(self): current_node
    TreeManagerContainer.get_tree_manager(self): CUDAGraphTreeManager
    get_obj(local, attr_name): _get_obj_in_tls

torch._inductor.cudagraph_trees StorageWeakRefWrapper
    StorageWeakRefWrapper.swap_weakref(self, cdata): ref
    StorageWeakRefWrapper.__call__(self): ref
    CUDAGraphNode.reconstruct_outputs(self): swap_weakref
    torch.multiprocessing.reductions StorageWeakRef.from_weakref(cls, cdata): cdata

torch._inductor.cudagraph_trees TreeManagerContainer
    TreeManagerContainer.__init__(self, device_index): tree_manager lock
    TreeManagerContainer.add_strong_reference(self, fn): lock finalize_cudagraphify_fn
    TreeManagerContainer.finalize_cudagraphify_fn(self): lock _finalize_tree_manager
    TreeManagerContainer.get_tree_manager(self): lock tree_manager CUDAGraphTreeManager

torch._inductor.cudagraph_trees get_container
    get_container(device_index): tree_manager_locks TreeManagerContainer

torch._inductor.cudagraph_trees cudagraphify_impl
    cudagraphify_impl(model, inputs, static_input_idxs): cudagraphify
    torch._dynamo.backends.cudagraphs cudagraphs: cudagraphify_impl
    torch._inductor.compile_fx get_input_idxs_to_check(inputs, static_input_idxs)
    torch._inductor.utils align_inputs_from_check_idxs(model, inputs_to_check, mutated_input_idxs)

torch._inductor.cudagraph_trees reset_cudagraph_trees
    reset_cudagraph_trees()

torch._inductor.compile_fx cudagraphify
    cudagraphify(model, static_input_idxs): cudagraphify_impl is_backward
  in torch._inductor.output_code
    cudagraph_partition_post_compile: cudagraphify
    cudagraph_post_compile: cudagraphify

torch._inductor.output_code CompiledFxGraph.post_compile
    CompiledFxGraph.post_compile(self, example_inputs, constants, graph_kwargs): cudagraphs
        cudagraph_partition_post_compile cudagraph_post_compile current_callable
    torch._inductor.utils BoxedBool.disable

torch._inductor.output_code maybe_handle_backward_generation
    maybe_handle_backward_generation(compiled_graph, boxed_forward_device_index): is_backward get_manager
        set_to_running_backward current_callable
    cudagraph_post_compile: maybe_handle_backward_generation
    cudagraph_partition_post_compile: maybe_handle_backward_generation

torch._inductor.output_code CompiledFxGraph.__call__
    CompiledFxGraph.__call__(self, inputs): current_callable _is_profiler_enabled RECORD_GRAPH_EXECUTION finish
        end_compile

torch._functorch._aot_autograd.aot_autograd_result GenericAOTAutogradResult.wrap_post_compile
    2.11 GenericAOTAutogradResult.wrap_post_compile(self, args, aot_config, fx_config): compiled_fw post_compile
        runtime_metadata maybe_subclass_meta
    2.12-2.15 GenericAOTAutogradResult.wrap_post_compile(self, args, aot_config, fx_config): _load_and_post_compile
        _apply_runtime_wrappers
    2.12-2.15 GenericAOTAutogradResult._load_and_post_compile: compiled_fw post_compile
    2.12-2.15 GenericAOTAutogradResult._apply_runtime_wrappers: runtime_metadata maybe_subclass_meta

torch._dynamo.symbolic_convert InstructionTranslatorBase.log_graph_break
    InstructionTranslatorBase.log_graph_break(self, code_options, reason, exc): logged real_stack

torch._inductor.compile_fx fx_codegen_and_compile
    fx_codegen_and_compile(gm, example_inputs, inputs_to_check): codegen_and_compile
    _compile_fx_inner: fx_codegen_and_compile
  in torch._inductor.lowering
    cat(inputs, dim): force_pointwise_cat ConcatKernel

torch._inductor.scheduler Scheduler.get_graph_partition_signature
    Scheduler.get_graph_partition_signature(self, partitions, skip_cudagraphs): skip_cudagraphs
    Scheduler.graph_partition(self): partitions get_graph_partition_signature skip_cudagraphs
  in torch._inductor.ir
    ConcatKernel.realize_into: NonOwningLayout
    NonOwningLayout.__init__(self, view): view

torch._inductor.scheduler Scheduler.graph_partition
    Scheduler.graph_partition(self): partitions signatures should_partition
    Scheduler.should_partition(self, node)
    Scheduler._codegen_partitions(self): graph_partition
    GroupedSchedulerNode
    NopKernelSchedulerNode
  in torch._inductor.ir
    DeviceCopy
    MultiOutput

torch._inductor.output_code CompiledFxGraph.__init__
    CompiledFxGraph.__init__(self, current_callable, graph, gm, output_strides, disabled_cudagraphs_reason):
        cudagraph_info partition_maps device_types disabled_cudagraphs_reason

torch Tensor.record_stream
    torch.overrides get_testing_overrides: record_stream

torch UntypedStorage._share_cuda_
    torch.multiprocessing.reductions reduce_tensor(tensor): _share_cuda_

torch _lazy_clone Tensor._lazy_clone
    torch.overrides get_ignored_functions

torch.cuda CUDAGraph.capture_begin CUDAGraph.capture_end
  in torch.cuda.graphs
    CUDAGraph.capture_begin(self, pool)
    CUDAGraph.capture_end(self)
    graph.__enter__(self): capture_begin pool
    graph.__exit__(self): capture_end

torch.cuda.memory _cuda_beginAllocateCurrentThreadToPool _cuda_endAllocateToPool
    use_mem_pool(pool, device): _cuda_beginAllocateCurrentThreadToPool _cuda_endAllocateToPool _cuda_releasePool

torch._dynamo.variables.optimizer _is_static_for_cudagraphs
    _is_static_for_cudagraphs(x): get_manager get_static_address_type current_node
    torch._dynamo.utils get_static_address_type(t)

torch._dynamo.utils record_pregraph_bytecode_enter
    record_pregraph_bytecode_enter(): _is_profiler_enabled

torch._dynamo.utils record_pregraph_bytecode_exit
    record_pregraph_bytecode_exit(cm): __exit__

torch._functorch.utils unwrap_dead_wrappers
    2.11-2.13 unwrap_dead_wrappers(args): unwrap_if_dead
    2.14-2.15 unwrap_dead_wrappers
    2.11-2.13 torch.autograd.function Function.apply: unwrap_dead_wrappers

torch._functorch._aot_autograd.runtime_wrappers RuntimeWrapper.post_compile
    RuntimeWrapper.post_compile(self, compiled_fn, aot_config)
    2.11 AOTDispatchAutograd.post_compile: RuntimeWrapper CompiledFunction apply _aot_id
    2.12-2.15 AOTDispatchAutograd.post_compile: RuntimeWrapper build apply
    2.12-2.15 _AOTDispatchAutogradFunctionFactory.build: CompiledFunction _aot_id
    torch.autograd.function FunctionMeta.__init__(cls, name, bases, attrs): _backward_cls

torch.autograd _engine_run_backward
    backward(tensors, grad_tensors, retain_graph, create_graph): _engine_run_backward _are_functorch_transforms_active
    grad: _engine_run_backward
    torch.autograd.graph _engine_run_backward(t_outputs): run_backward log getEffectiveLevel
  in torch.autograd.function
    2.11-2.12 BackwardCFunction.apply(self): backward _forward_cls
    2.13-2.15 BackwardCFunction.apply(self): _get_user_fn boxed_grads_call
    2.13-2.15 BackwardCFunction.apply_boxed(self): _get_user_fn
    torch._dynamo.compiled_autograd reset: compiled_autograd_enabled in_compiled_autograd_region

torch.autograd.graph _engine_run_backward
    _engine_run_backward(t_outputs): run_backward log getEffectiveLevel

torch._dynamo.eval_frame _TorchDynamoContext.__call__
    _TorchDynamoContext.__call__(self, fn): compile_wrapper _torchdynamo_orig_callable
    _TorchDynamoContext.__init__: enter_exit_hooks callback export
    _callback_from_stance(callback): _stance stance
    innermost_backend(fn)
    OptimizedModule._initialize: forward dynamo_ctx __call__
    OptimizedModule.__call__(self): _has_any_global_hook _set_in_optimized_module __call__
  in torch.nn.modules.module
    Module._wrapped_call_impl(self): _compiled_call_impl _call_impl
    2.11-2.14 Module._call_impl(self): _get_tracing_state forward _backward_hooks _backward_pre_hooks _forward_hooks
        _forward_pre_hooks _global_backward_pre_hooks _global_backward_hooks _global_forward_hooks
        _global_forward_pre_hooks
    2.15 Module._call_impl(self): _is_tracing forward _backward_hooks _backward_pre_hooks _forward_hooks
        _forward_pre_hooks _global_backward_pre_hooks _global_backward_hooks _global_forward_hooks
        _global_forward_pre_hooks
    torch._guards TracingContext.try_get: _TLS
    2.11-2.13 torch.fx._symbolic_trace Tracer.trace(self, root): _is_fx_tracing_flag
    2.14-2.15 torch.fx._symbolic_trace Tracer.trace(self, root): _set_is_fx_tracing patch_method Module
    torch._dynamo.guards CheckFunctionManager.invalidate(self, obj_str): cache_entry extra_state

torch._functorch._aot_autograd.runtime_wrappers _AutogradSavedState.save_from_forward
    2.11 AOTDispatchAutograd.post_compile: CompiledFunction _is_view save_for_backward
    2.12-2.13 _AutogradSavedState.save_from_forward(self, ctx, fw_outs): metadata _is_view detach save_for_backward
        tensors_saved_for_backwards_with_vc_check_slice tensors_saved_for_backwards_no_vc_check_slice
        dynamic_saved_tensors_idxs _tensors_no_vc_check symints opaque_objects
    2.14-2.15 _AutogradSavedState.save_from_forward(self, ctx, fw_outs): metadata _is_view detach save_for_backward
        tensors_saved_for_backwards_with_vc_check_slice tensors_saved_for_backwards_no_vc_check_slice
        dynamic_saved_tensors_idxs _tensors_no_vc_check symints opaque_objects saved_tensor_is_graph_input
    2.12-2.15 _AOTDispatchAutogradFunctionFactory.build: _AutogradSavedState save_from_forward
    2.12-2.15 torch._functorch._aot_autograd.schemas ViewAndMutationMeta: num_symints_saved_for_bw
        num_opaque_objects_saved_for_bw
    2.12-2.15 torch._dynamo.eval_frame skip_code(code)

torch._inductor.fx_passes.post_grad move_constructors_to_gpu
    move_constructors_to_gpu(graph): ConstructorMoverPass
    post_grad_passes(gm, is_inference): move_constructors_to_gpu
  in torch._inductor.lowering
    register_lowering(aten_fn, broadcast)
    make_pointwise(fn)
    torch._inductor.ops_handler OpsHandler.mul_rn(self, x, y)

torch._inductor.compile_fx _recursive_post_grad_passes
    _recursive_post_grad_passes(gm, is_inference): _recursive_post_grad_passes post_grad_passes

torch._inductor.compile_fx compile_fx
    compile_fx(model_, example_inputs_, inner_compile, config_patches): compile_fx patch

torch._inductor.codegen.wrapper MemoryPlanningState.__contains__
    MemoryPlanningState.__contains__(self, key): reuse_pool
    AllocateLine.plan(self, state): buffer_reuse_key state
    buffer_reuse_key(node): get_device_or_error

torch._inductor.scheduler Scheduler.should_partition
    Scheduler.should_partition(self, node): FusedSchedulerNode snodes is_gpu DeviceCopy
    FusedSchedulerNode
    torch._inductor.ir FallbackKernel
    torch._inductor.graph GraphLowering.try_get_buffer(self, buffer_name)

torch._inductor.scheduler ForeachKernelSchedulerNode.get_consumer_subnode_for
    ForeachKernelSchedulerNode.get_consumer_subnode_for(self, producer): get_outputs read_to_node
    FusedSchedulerNode.__init__(self, scheduler, snodes): snodes
    BaseSchedulerNode.get_outputs(self)

torch._inductor.runtime.triton_heuristics CachingAutotuner.run
    CachingAutotuner.run(self, stream, benchmark_run): launchers
    CachingAutotuner.__init__(self, fn, triton_meta, configs): triton_meta device_props inductor_meta launchers
        triton_interpret mutated_arg_names custom_kernel
    CachingAutotuner._create_compile_meta(self, cfg): triton_meta constants num_warps num_stages
    CachingAutotuner._precompile_config(self, cfg): ASTSource signature constants configs _create_compile_meta
    CachingAutotuner.precompile: _reload_kernel
    CachingAutotuner.get_device_interface(self)
    StaticTritonCompileResult.make_launcher(self): _gen_launcher_code
    TritonCompileResult.make_launcher(self): _gen_launcher_code
    CompileResult._gen_launcher_code(self, scope, def_args)
"""


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """A definition on which a patch relies in the torch versions from ``since`` to ``until``, both included."""

    since: Version
    until: Version
    module: str  # dotted, "torch._inductor.scheduler"
    name: str  # inside the module, "Scheduler.graph_partition"
    parameters: tuple[str, ...] | None = None  # the leading parameters, None if they do not matter
    uses: tuple[str, ...] = ()  # names in the body: globals, attributes, locals, strings

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


_VERSIONS, _MODULE = r"(?:(\d+\.\d+)(?:-(\d+\.\d+))? +)?", r"(?:(torch[\w.]*) +)?"
_ROW = re.compile(_VERSIONS + _MODULE + r"([a-zA-Z_][\w.]*)(?:\(([\w, ]*)\))?(?::([\w ]+))?")
_CONTINUATION = re.compile(r"\n {5,}")


def parse_version(text: str) -> Version:
    """Major and minor number of a torch version: ``(2, 13)`` for ``"2.13.0+cpu"``."""
    major, minor = text.split(".")[:2]
    return int(major), int(minor)


def parse(table: str) -> dict[str, tuple[Fingerprint, ...]]:
    rows: dict[str, list[Fingerprint]] = {}
    targets: list[str] = []
    module = ""
    for line in map(str.rstrip, _CONTINUATION.sub(" ", table).splitlines()):
        if line and not line.startswith(" "):
            module, *names = line.split()
            targets = [f"{module}.{name}" for name in names]
            rows |= {target: [] for target in targets}
        elif line.startswith("  in "):
            module = line.removeprefix("  in ")
        elif line:
            if (found := _ROW.fullmatch(line.strip())) is None or not targets:
                raise ValueError(
                    f"expected 'VERSIONS MODULE DEFINITION(PARAMETERS): NAMES' under names of targets, got {line!r}"
                )
            since, until, other, name, given, uses = found.groups()
            parameters = None if given is None else tuple(given.replace(",", " ").split())
            versions = (parse_version(since), parse_version(until or since)) if since else _SUPPORTED
            row = Fingerprint(*versions, other or module, name, parameters, tuple((uses or "").split()))
            for target in targets:
                rows[target].append(row)
    return {target: tuple(found) for target, found in rows.items()}


FINGERPRINTS = parse(_TABLE)  # by target
