"""Wraps the functions and methods through which torch reaches its CUDA graph trees.

Each function takes upstream's function and returns its replacement. Torch calls most of these when it compiles, loads,
calls or resets; programs call :func:`record_stream`, :func:`capture_begin`, :func:`capture_end`, and functions that
:func:`outside_of_pools` wraps.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch._dynamo.utils import get_static_address_type
from torch._inductor import config, cudagraph_trees, debug
from torch._inductor.utils import BoxedBool
from torch.autograd import profiler

from pygraph_trees.compat import graph_policy, leaves_broken_captures
from pygraph_trees.cuda.extent import tensors_with_memory
from pygraph_trees.indirection.retired import release_retired
from pygraph_trees.native import binding
from pygraph_trees.report import compiled
from pygraph_trees.report.naming import BACKWARD
from pygraph_trees.selection.functions import are_graphs_left_out, has_own_policy, why_not_graphed, why_overridden
from pygraph_trees.settings import Settings

from ..functions import home
from ..functions.containment import described, end_allocations
from ..functions.dispatch import PER_THREAD
from ..functions.function import ASSUMED, LOADED, Aligned, FunctionModel, aligning, entered, staying
from ..functions.threads import for_each_thread
from ..pools import pools
from ..pools.capture_lock import is_by_torch, is_captured
from ..pools.collector import paused
from ..pools.interrupts import deferred
from .choice import as_upstream_has_it, chooser, only_sizes_that_come_again
from .manager_container import has_trees, without_others
from .runner import shortened
from .saved_tensors import ALIGNED, conform_inputs, conforming, hooks_were_set, is_any_lazy, leave

_log = logging.getLogger("pygraph_trees.trees")

LEAVES_BROKEN_CAPTURES = leaves_broken_captures()


def cudagraphify(upstream: Callable[..., Any]) -> Callable[..., Any]:
    """Notes the settings of each function: values from ``mode=`` and ``options=`` are valid only while compiling."""

    @functools.wraps(upstream)
    def cudagraphify(model: Any, static_input_idxs: Any = (), *args: Any, **kwargs: Any) -> Any:
        function = FunctionModel.of(model, is_backward=kwargs["is_backward"], is_inference=kwargs["is_inference"])
        aligned = Aligned(function, static_input_idxs, kwargs.get("mutated_input_idxs", ()))
        make = functools.partial(upstream, function, static_input_idxs, *args, **kwargs)
        device = kwargs["device_index"]
        is_per_thread = PER_THREAD and config.triton.cudagraph_trees and function.settings.indirection != "off"
        run = for_each_thread(make, function.log, aligned) if is_per_thread else make()
        return entered(function, run, aligned, chooser(device), _elsewhere(function, aligned, device))

    return cudagraphify


def cudagraphify_impl(upstream: Callable[..., Any]) -> Callable[..., Any]:
    """Keeps functions un-graphed if the settings say so, and hides inputs on the CPU from upstream."""

    @functools.wraps(upstream)
    def cudagraphify_impl(model: Any, inputs: list[Any], static_input_idxs: Any, *args: Any, **kwargs: Any) -> Any:
        # Functions from Inductor were wrapped when they were compiled; others are from backend="cudagraphs".
        function = FunctionModel.of(model, is_backward=kwargs["is_backward"], is_inference=kwargs["is_inference"])
        function.note_tangents(len(inputs), static_input_idxs)
        if (reason := why_not_graphed(function.settings)) is not None:
            function.log.not_graphed(reason)
            # If a backward cannot be graphed, the backend expects that its forward has made a manager.
            cudagraph_trees.get_manager(kwargs["device_index"])
            return function
        if function.settings.placement != "off":
            # Inductor treats buffers as static, but a CPU input is staged at each call, whatever its address. For each
            # partition, Inductor also names CPU inputs that only code outside of the partition mutates.
            static_input_idxs = _on_gpu(static_input_idxs, inputs)
            kwargs["mutated_input_idxs"] = tuple(_on_gpu(kwargs.get("mutated_input_idxs", ()), inputs))
        if function.settings.indirection != "off":
            static_input_idxs = staying(inputs, function.assumed, static_input_idxs)
        run = upstream(function, inputs, static_input_idxs, *args, **kwargs)
        mutated = set(kwargs.get("mutated_input_idxs", ()))
        if (mutated or function.assumed) and function.settings.indirection != "off":
            run = _aligned_first(run, function.assumed, static_input_idxs, mutated)
        aligned, device = Aligned(function, static_input_idxs, mutated), kwargs["device_index"]
        run = only_sizes_that_come_again(function, run, inputs, aligned, device)
        if function.settings.indirection == "off":
            return run
        run = entered(function, run, aligned, way_elsewhere=_elsewhere(function, aligned, device))
        # Functions from Inductor do not need this: the call of their compiled graph conforms the inputs.
        return run if function is model else conforming(run, is_backward=kwargs["is_backward"])

    return cudagraphify_impl


def loading(upstream: Callable[..., Any]) -> Callable[..., Any]:
    """Remembers AOTAutograd's metadata of a program loaded from its cache while the program's graphs are put to use."""

    @functools.wraps(upstream)
    def wrap_post_compile(self: Any, *args: Any, **kwargs: Any) -> Any:
        of_subclass = self.maybe_subclass_meta
        token = LOADED.set(self.runtime_metadata if of_subclass is None else of_subclass.fw_metadata)
        try:
            return upstream(self, *args, **kwargs)
        finally:
            LOADED.reset(token)

    return wrap_post_compile


def putting_to_use(upstream: Callable[..., Any]) -> Callable[..., Any]:
    """Decides whether CUDA graphs are used for a graph, reports it, and shortens the code around its only partition."""

    @functools.wraps(upstream)
    def post_compile(self: Any, example_inputs: Any, constants: Any, graph_kwargs: Any) -> None:
        wanted = bool(graph_kwargs["cudagraphs"]) or are_graphs_left_out()
        settings = Settings.current()
        reason = why_not_graphed(settings) if wanted else None
        is_ours = settings.indirection != "off" and not has_own_policy()
        if wanted and reason is None and is_ours:
            reason = compiled.why_not_replayed(self)
        if reason is None and settings.indirection != "off":
            reason = why_overridden(is_backward=graph_kwargs["is_backward"])
            wanted = wanted or reason is not None  # torch forgets a backward's override if it comes from its cache
        if reason is not None:
            BoxedBool.disable(graph_kwargs["cudagraphs"])
        token = ASSUMED.set(_assumed(self))
        try:
            with compiled.put_to_use(self, graph_kwargs, wanted=wanted, dropped=reason):
                upstream(self, example_inputs, constants, graph_kwargs)
        finally:
            ASSUMED.reset(token)
        index = graph_kwargs.get("boxed_forward_device_index")
        if reason is not None and graph_kwargs["is_backward"] and index is not None and index.value is not None:
            self.current_callable = as_upstream_has_it(self.current_callable, BACKWARD, index.value)
        if graph_kwargs["cudagraphs"] and is_ours:
            self.current_callable = shortened(self.current_callable) or self.current_callable
        else:
            leave(self)

    return post_compile


def of_ungraphed_backward(upstream: Callable[..., Any]) -> Callable[..., Any]:
    """Lets each call look for the manager. Upstream asserts that the forward made one, and tells that one forever."""

    @functools.wraps(upstream)
    def maybe_handle_backward_generation(compiled_graph: Any, boxed_forward_device_index: Any) -> None:
        graph, index = compiled_graph, getattr(boxed_forward_device_index, "value", None)
        if graph.fx_kwargs["is_backward"] and config.triton.cudagraph_trees and index is not None:
            manager = cudagraph_trees.get_manager(index, create_if_none_exists=False)
            graph.current_callable = as_upstream_has_it(graph.current_callable, BACKWARD, index, manager)
        else:
            upstream(compiled_graph, boxed_forward_device_index)

    return maybe_handle_backward_generation


def calling(upstream: Callable[..., Any]) -> Callable[..., Any]:
    """Gives inputs the layout that was compiled for, and skips upstream's call if a fast replay gives the outputs."""
    if binding.extension is not None:
        given = {"profiler": vars(profiler), "debug": vars(debug), "conform_inputs": conform_inputs}
        return binding.extension.Call(upstream=upstream, **given)

    @functools.wraps(upstream)
    def __call__(self: Any, inputs: Any) -> Any:
        if hooks_were_set() or is_any_lazy(inputs):
            conform_inputs(self, inputs)
        return upstream(self, inputs)

    return __call__


def reset_cudagraph_trees(upstream: Callable[[], None]) -> Callable[[], None]:
    """Also gives back the memory of managers that were freed with their functions instead of being shut down."""

    @functools.wraps(upstream)
    def reset_cudagraph_trees() -> None:
        # Of this thread. They are freed below, since other threads may run while they are.
        found = cudagraph_trees.get_obj(cudagraph_trees.local, "tree_manager_containers") if has_trees() else {}
        dropped = list(found.values())
        try:
            with paused(), deferred(), without_others():  # upstream holds a lock for which a finalizer would wait
                upstream()
        finally:
            cudagraph_trees._set_cached_tensors_enabled(True)
        dropped.clear()
        with paused():  # a finalizer could wait for the lock
            release_retired()

    return reset_cudagraph_trees


def is_static_for_cudagraphs(upstream: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """Also answers for a tensor on a GPU if no recording is open; upstream asserts that one is."""

    @functools.wraps(upstream)
    def is_static_for_cudagraphs(x: Any) -> bool:
        manager = cudagraph_trees.get_manager(x.device.index, False) if x.is_cuda else None
        if manager is not None and manager.current_node is None:
            return get_static_address_type(x) is not None
        return upstream(x)

    return is_static_for_cudagraphs


def record_stream(upstream: Callable[..., None]) -> Callable[..., None]:
    """Also notes that another stream uses the memory, which replays do not overwrite before."""
    if binding.extension is None:
        return upstream

    @functools.wraps(upstream)
    def record_stream(self: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        upstream(self, *args, **kwargs)
        (stream,) = args or kwargs.values()
        for tensor in tensors_with_memory(self):
            if tensor.is_cuda:
                binding.extension.note_stream(tensor)
                pools.note_stream(tensor, stream)

    return record_stream


def outside_of_pools(upstream: Callable[..., Any]) -> Callable[..., Any]:
    """Moves the output that it is given out of its graph pool first, because memory is shared from then on."""
    if binding.extension is None:
        return upstream

    @functools.wraps(upstream)
    def on_own_memory(self: Any, *args: Any, **kwargs: Any) -> Any:
        storages = [t.untyped_storage() for t in tensors_with_memory(self) if t.layout is torch.strided]
        for storage in [self] if isinstance(self, torch.UntypedStorage) else storages:
            for manager in pools.managers():
                if pools.holds(manager, storage) and not is_captured():
                    manager.move_out(storage)
        return upstream(self, *args, **kwargs)

    return on_own_memory


def capture_begin(upstream: Callable[..., None]) -> Callable[..., None]:
    """Also ends the thread's open paths as a new step does, unless a recording or a manager is made."""

    @functools.wraps(upstream)
    def capture_begin(self: Any, *args: Any, **kwargs: Any) -> None:
        pool = args[0] if args else kwargs.get("pool")
        is_programs = pool not in pools.OWNED and not is_by_torch()
        for manager in pools.managers() if is_programs else ():
            thread, device = manager.thread, manager.device_index
            if thread in (None, threading.get_ident()) if PER_THREAD else not home.is_used_elsewhere(device):
                try:
                    why: object = None if manager.end_step() else "another call is under way"
                except Exception as error:  # for example, no memory is free
                    why = described(error)
                if why is not None:
                    _log.warning("outputs that a graph of the program may read could not be kept: %s", why)
        if not (is_programs and LEAVES_BROKEN_CAPTURES):
            upstream(self, *args, **kwargs)
            return
        pool = pool or torch.cuda.graph_pool_handle()  # torch does not return the id of a pool that it creates
        allocates = torch.cuda.current_device(), pool
        try:
            upstream(self, *args[1:], **{**kwargs, "pool": pool})
        except torch.AcceleratorError:
            end_allocations(*allocates)
            raise
        self.pygraph_allocates = allocates

    return capture_begin


def capture_end(upstream: Callable[..., None]) -> Callable[..., None]:
    """Also ends the allocations of a program's capture if the capture fails.

    Otherwise the allocator treats the capture as unfinished. It defers the release of blocks that other streams have
    used until the next recording. Recordings may have reused such blocks by then, and some may be deleted.
    """
    if not LEAVES_BROKEN_CAPTURES:
        return upstream

    @functools.wraps(upstream)
    def capture_end(self: Any) -> None:
        allocates = vars(self).pop("pygraph_allocates", None)
        try:
            upstream(self)
        except torch.AcceleratorError:
            with contextlib.suppress(RuntimeError):  # the GPU may be lost
                if allocates is not None and not is_captured():
                    end_allocations(*allocates)
            raise

    return capture_end


def _assumed(graph: Any) -> Iterator[set[int]]:
    """By partition, the inputs that the code of a graph takes to be aligned."""
    noted = getattr(graph, ALIGNED, None)  # without it, the code is from a cache of torch's own
    assumed = {*graph.inputs_to_check, *(graph.fx_kwargs["static_input_idxs"] or ())} if noted is None else set(noted)
    is_whole = not config.graph_partition or graph_policy(config) is not None
    maps = None if is_whole else graph.partition_maps
    for places in [found.input_index_mapping for found in maps or ()]:
        yield {index for index, of_graph in enumerate(places) if of_graph in assumed}
    if not maps:
        yield assumed


def _aligned_first(
    run: Any, assumed: Collection[int] | None, static_input_idxs: Any, mutated: set[int]
) -> Callable[[list[Any]], Any]:
    """``run``, but misaligned inputs are copied first, and back if mutated.

    Upstream copies inputs that are aligned in the first call with the same integers. The code may have been compiled
    for other ones: with other integers, or by another program, since torch's caches do not compare alignment.
    Upstream also loses writes to a copy.
    """
    by_integers: dict[tuple[int, ...], Callable[[list[Any]], Any]] = {}

    def call(inputs: list[Any]) -> Any:
        integers = tuple(value for value in inputs if isinstance(value, int))
        if integers not in by_integers:
            how = (assumed, inputs, static_input_idxs, mutated)
            by_integers[integers] = aligning(run, *how, besides_upstream=True)
        return by_integers[integers](inputs)

    return call


def _elsewhere(function: FunctionModel, aligned: Aligned, device: int) -> Callable[[bool], Any] | None:
    if PER_THREAD:
        return None
    return home.way_elsewhere(device, function.log, aligned, as_upstream_has_it(aligned, function.log.mode, device))


def _on_gpu(indices: Iterable[int], inputs: Sequence[Any]) -> list[int]:
    """Those of the indices at which no tensor on the CPU is given."""
    return [index for index in indices if not (isinstance(inputs[index], torch.Tensor) and inputs[index].is_cpu)]
