"""Patches of ``torch._inductor.cudagraph_trees``: our recording and manager, the entry of functions, the reset of all.

All four names are looked up in the module when they are used, so rebinding them there is enough; thread-local state,
liveness and pool rules and whatever a torch version adds stay upstream's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from .patch import Patch, Rebind

_MODULE = "torch._inductor.cudagraph_trees"


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
        removable="never: this is the drop-in",
    ),
    Rebind(
        feature="trees",
        module=_MODULE,
        name="CUDAGraphTreeManager",
        replace=_manager,
        removable="never: this is the drop-in",
    ),
    Rebind(
        feature="trees",
        module=_MODULE,
        name="cudagraphify_impl",
        replace=_cudagraphify_impl,
        removable="never: this is the drop-in",
    ),
    Rebind(
        feature="trees",
        module=_MODULE,
        name="reset_cudagraph_trees",
        replace=_reset_cudagraph_trees,
        removable="never: memory of recordings that are gone is given back there",
    ),
)
