"""The gradients of a call: from which outputs, with which tangents, taken by ``grad`` or accumulated by ``backward``.

By default each output has weights that differ from element to element. A special tangent replaces those of one output
(see :data:`around.TANGENTS`). One that does not fit its output, such as None for a matrix, raises as it does in a
user's program.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

Gradients = tuple["torch.Tensor | None", ...]


def gradients(
    outputs: Sequence[tuple[str, torch.Tensor]],
    leaves: Sequence[torch.Tensor],
    tangents: Mapping[str, str],
    accumulated: Callable[[], None] | None = None,
    *,
    retain: bool = False,
) -> Gradients:
    """The gradients of ``leaves``; None for leaves that no output depends on.

    Args:
        outputs: returned values with their names.
        tangents: kinds of special tangents by name of the output.
        accumulated: called after a gradient is accumulated; None takes gradients without accumulating them.
        retain: whether the graph is kept for another backward.
    """
    chosen = [(o, tangent(tangents.get(n), o)) for n, o in outputs if o.requires_grad and tangents.get(n) != "missing"]
    if not leaves or not chosen:
        return ()
    starts, given = zip(*chosen, strict=True)
    if accumulated is None:
        return torch.autograd.grad(starts, leaves, given, retain_graph=retain, allow_unused=True)
    handles = [leaf.register_post_accumulate_grad_hook(lambda _: accumulated()) for leaf in leaves]
    try:
        torch.autograd.backward(starts, given, retain_graph=retain, inputs=list(leaves))
        return tuple(leaf.grad for leaf in leaves)
    finally:
        for leaf, handle in zip(leaves, handles, strict=True):
            handle.remove()
            leaf.grad = None


def tangent(kind: str | None, output: torch.Tensor) -> torch.Tensor | None:
    shape, dtype, device = output.shape, output.dtype, output.device
    if kind == "zero":
        return torch._efficientzerotensor(shape, dtype=dtype, device=device)
    if kind == "expanded zero":
        return torch.zeros((), dtype=dtype, device=device).expand(shape)
    if kind == "expanded":
        return torch.full((), 0.5, dtype=dtype, device=device).expand(shape)
    if kind == "none":
        return None
    weights = torch.linspace(-1, 1, max(1, output.numel()), device=device)[: output.numel()].reshape(shape)
    if kind == "neg":
        return torch._neg_view(-weights.to(dtype))
    weights = torch.complex(weights, weights.flip(0) if shape else weights).to(dtype) if dtype.is_complex else weights
    return weights.conj() if kind == "conj" else weights.to(dtype)


def loss_of(outputs: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """A loss of all outputs that have a gradient; None without any."""
    real = [torch.view_as_real(o) if o.is_complex() else o for o in outputs if o.requires_grad and o.numel()]
    return sum((o.float().mean() * 8 for o in real[1:]), real[0].float().mean() * 8) if real else None
