"""Replaces the method with which a compiled function saves tensors for its backward.

Torch's method looks at each tensor in Python. :func:`saving` takes it and returns one that looks at them in C++. It
calls torch's for functions that :func:`.backward_edges.mark` did not mark, for those that also save sizes or opaque
objects, and if a mode or a tensor's class may have code of its own. Without the C++ parts, or if torch's method does
not save what this one does, :func:`saving` returns torch's.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch._dynamo.eval_frame import skip_code
from torch.autograd.function import FunctionCtx

from pygraph_trees.compat import knows_saved_inputs
from pygraph_trees.native import binding
from pygraph_trees.reasons import Reason, Why

_log = logging.getLogger("pygraph_trees.trees")
_checks = (0, 0)  # of the self-test, by whether C++ looked at the tensors
_with_others = 0  # forwards that also saved something that is no tensor


def saving(upstream: Callable[..., None]) -> Callable[..., None]:
    """The method, with the tensors looked at in C++; torch's own if that cannot be relied on."""
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


def counts() -> tuple[int, dict[Why, int]]:
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
