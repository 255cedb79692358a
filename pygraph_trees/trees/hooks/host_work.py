"""Replaces functions of torch that look at each argument or tensor in Python at each call, or mark the call.

Each function takes upstream's function and returns its replacement: :func:`enter` and :func:`exit` for the profiler's
marks around a compiled function's inputs, :func:`unwrapping` for the search for dead functorch wrappers, and
:func:`saving` for the method that saves a backward's tensors. Without the C++ parts, upstream's is returned.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch._dynamo.eval_frame import skip_code
from torch.autograd import profiler
from torch.autograd.function import FunctionCtx

from pygraph_trees.compat import are_call_marks_wrapped, knows_saved_inputs, unwraps_in_python
from pygraph_trees.native import binding
from pygraph_trees.reasons import Reason, Why

_log = logging.getLogger("pygraph_trees.trees")
_checks = (0, 0)  # of the self-test of :func:`saving`, by whether C++ looked at the tensors
_with_others = 0  # forwards that also saved something that is no tensor


def enter(upstream: Callable[..., Any]) -> Callable[..., Any]:
    def record_pregraph_bytecode_enter() -> Any:
        return upstream() if profiler._is_profiler_enabled else None

    return _uncompiled(upstream, record_pregraph_bytecode_enter)


def exit(upstream: Callable[..., Any]) -> Callable[..., Any]:
    def record_pregraph_bytecode_exit(mark: Any) -> None:
        if mark is not None:
            upstream(mark)

    return _uncompiled(upstream, record_pregraph_bytecode_exit)


def _uncompiled(upstream: Callable[..., Any], function: Callable[..., Any]) -> Callable[..., Any]:
    """Marks ``function`` so that Dynamo does not compile it; returns ``upstream`` if Dynamo does not wrap it."""
    if not are_call_marks_wrapped():
        return upstream
    function.__wrapped__ = upstream  # type: ignore[attr-defined]
    frames = torch._C._dynamo.eval_frame
    skip = frames._FrameAction.SKIP
    frames.set_code_exec_strategy(function.__code__, frames._FrameExecStrategy(skip, skip))
    return function


def unwrapping(upstream: Callable[..., Any]) -> Callable[..., Any]:
    if binding.extension is None or not unwraps_in_python():
        return upstream
    return binding.extension.unwrapping(upstream)  # Dynamo sees no frame of it to compile


def saving(upstream: Callable[..., None]) -> Callable[..., None]:
    """It stays torch's for functions that :func:`.backward_edges.mark` did not mark, if sizes or opaque objects are
    saved too, and if a mode or a tensor's class may have code of its own.
    """
    if binding.extension is None:
        return upstream
    detach_views, are_inputs_known = binding.extension.detach_views, knows_saved_inputs()

    @functools.wraps(upstream)
    def save_from_forward(self: Any, ctx: Any, fw_outs: Any) -> None:
        if not getattr(ctx, "pygraph_entry_is_short", False):
            return upstream(self, ctx, fw_outs)
        metadata = self.metadata
        has_others = metadata.num_symints_saved_for_bw or metadata.num_opaque_objects_saved_for_bw
        if not has_others and not metadata.dynamic_saved_tensors_idxs:
            checked = fw_outs[metadata.tensors_saved_for_backwards_with_vc_check_slice]
            unchecked = fw_outs[metadata.tensors_saved_for_backwards_no_vc_check_slice]
            if detach_views(checked, unchecked, metadata.saved_tensor_is_graph_input if are_inputs_known else None):
                ctx.save_for_backward(*checked)
                ctx._tensors_no_vc_check = unchecked
                ctx.symints, ctx.opaque_objects = [], []
                return None
        else:
            global _with_others
            _with_others += 1
        return upstream(self, ctx, fw_outs)

    skip_code(save_from_forward.__code__)  # type: ignore[attr-defined]  # Dynamo does not compile torch's either
    try:
        difference = _difference(upstream, save_from_forward)
    except Exception as error:
        difference = f"{type(error).__name__}: {error}"
    global _checks
    *_, done, left = binding.extension.counted_host_work()
    _checks = done, left
    if difference is not None:
        _log.warning("torch's method still saves tensors for backwards: %s", difference)
    return save_from_forward if difference is None else upstream


def arguments() -> tuple[int, dict[Why, int]]:
    """How many calls of autograd functions had no dead wrapper, and how many had one."""
    plain, wrapped, *_ = (0, 0) if binding.extension is None else binding.extension.counted_host_work()
    return plain, {Reason.WRAPPED(): wrapped} if wrapped else {}


def forwards() -> tuple[int, dict[Why, int]]:
    """How many forwards of compiled functions saved their tensors at once; how many did not, by reason."""
    if binding.extension is None:
        return 0, {}
    *_, plain, others = binding.extension.counted_host_work()
    found = {Reason.SAVES_OTHERS(): _with_others, Reason.NOT_PLAIN(): others - _checks[1]}
    return plain - _checks[0], {why: count for why, count in found.items() if count}


def _difference(one: Callable[..., None], other: Callable[..., None]) -> str | None:
    """How two such methods differ, or None: what they save of parameters, views, and views that are inputs."""
    base = torch.zeros(4, dtype=torch.float32, device="cpu")
    given = [base, torch.nn.Parameter(base), base[:2], base[:2], base, base[2:], base[2:]]
    metadata = SimpleNamespace(
        tensors_saved_for_backwards_with_vc_check_slice=slice(1, 4),
        tensors_saved_for_backwards_no_vc_check_slice=slice(4, None),
        symints_saved_for_backwards_slice=slice(0, 0),
        opaque_objects_saved_for_backwards_slice=slice(0, 0),
        num_symints_saved_for_bw=0,
        num_opaque_objects_saved_for_bw=0,
        dynamic_saved_tensors_idxs={},
        saved_tensor_is_graph_input=[False, True, False] * 2,
    )

    def saved(save: Callable[..., None]) -> dict[str, Any]:
        ctx = type("Context", (FunctionCtx,), {"pygraph_entry_is_short": True})()
        save(SimpleNamespace(metadata=metadata), ctx, list(given))
        return {name: (type(values), [described(value) for value in values]) for name, values in vars(ctx).items()}

    def described(value: Any) -> Any:
        places = [i for i, tensor in enumerate(given) if tensor is value]
        return places, value._is_view(), value.storage_offset(), value.requires_grad

    found = [saved(save) for save in (one, other)]
    return None if found[0] == found[1] else f"{found[0]} instead of {found[1]}"
