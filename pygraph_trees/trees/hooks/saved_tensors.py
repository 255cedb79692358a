"""Gives the inputs of a compiled backward the layouts that were compiled for, whatever saved-tensor hooks return.

Hooks may return a saved tensor with other strides, type or device, even at the same address; neither autograd nor
compiled code checks. Calls check only after hooks were set while a compiled graph ran (:func:`hooks_were_set`), or if a
tangent may be a negated or conjugate view (:func:`is_any_lazy`): compiled code reads its memory as it is.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from pygraph_trees.compat import has_size_hint
from pygraph_trees.report import compiled

_log = logging.getLogger("pygraph_trees.trees")
_PLAIN = (torch.Tensor, torch.nn.Parameter)
ATTRIBUTE = "pygraph_saved"  # of a CompiledFxGraph
ALIGNED = "pygraph_aligned"  # of a CompiledFxGraph: the numbers of the inputs that its code takes to be aligned
_set = False


class Layout(NamedTuple):
    """The layout that an input must have; Inductor's caches keep it as a plain tuple."""

    number: int  # of the input
    dtype: torch.dtype
    device: torch.device
    sizes: tuple[int, ...] | None  # None if they are symbolic
    strides: tuple[int, ...]  # if sizes are symbolic, those of one example: only their order counts


def hooks_were_set() -> bool:
    """Whether saved-tensor hooks are set in this thread, or were set at an earlier call of this function."""
    global _set
    _set = _set or torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
    return _set


def is_any_lazy(inputs: Any) -> bool:
    """Whether an input is a negated or conjugate view."""
    return any(isinstance(value, torch.Tensor) and (value.is_neg() or value.is_conj()) for value in inputs)


def attach(artifact: Any, graph: Any) -> None:
    """Notes on the ``CompiledFxGraph`` of a backward the layouts of its inputs in ``graph``, a ``GraphLowering``."""
    if not getattr(graph, "is_backward", False):
        return
    try:
        found = [_layout(graph, number, value) for number, value in enumerate(graph.graph_inputs.values())]
        setattr(artifact, ATTRIBUTE, [tuple(layout) for layout in found if layout is not None])
    except Exception:
        _log.warning("the inputs of a compiled backward could not be described", exc_info=True)


def describing(upstream: Callable[..., Any]) -> Callable[..., Any]:
    """``CompiledFxGraph.__init__``; then describes the graph, and calls :func:`attach` if it asks for CUDA graphs."""
    from torch._inductor import config

    @functools.wraps(upstream)
    def __init__(self: Any, current_callable: Any, graph: Any, gm: Any, *args: Any, **kwargs: Any) -> None:
        upstream(self, current_callable, graph, gm, *args, **kwargs)
        compiled.attach(self, graph, gm)
        if config.triton.cudagraphs:
            is_aligned = (name not in graph.unaligned_buffers for name in graph.graph_inputs)
            setattr(self, ALIGNED, [number for number, known in enumerate(is_aligned) if known])
            attach(self, graph)

    return __init__


def leave(artifact: Any) -> None:
    """Removes the noted layouts, because CUDA graphs are not used for the graph."""
    if hasattr(artifact, ATTRIBUTE):
        setattr(artifact, ATTRIBUTE, None)


def _layout(graph: Any, number: int, value: Any) -> Layout | None:
    """An input's layout; None for a number, and for a tensor of symbolic sizes that has gaps."""
    from torch._inductor.ir import TensorBox

    if not isinstance(value, TensorBox):
        return None
    sizes, strides, device = value.get_size(), value.get_stride(), value.get_device()
    is_static = not any(getattr(size, "free_symbols", ()) for size in (*sizes, *strides))
    hint = graph.sizevars.size_hint if has_size_hint() else graph.sizevars.optimization_hint  # an example
    as_number = int if is_static else hint
    shown, example = tuple(map(as_number, sizes)), tuple(map(as_number, strides))
    if device is None or not (is_static or _are_alike(shown, example, _dense_strides(shown, example))):
        return None
    return Layout(number, value.get_dtype(), device, shown if is_static else None, example)


def layouts_of(inputs: Sequence[Any]) -> list[Layout]:
    return [
        Layout(number, value.dtype, value.device, tuple(value.shape), value.stride())
        for number, value in enumerate(inputs)
        if isinstance(value, torch.Tensor) and value.layout is torch.strided and not _reads_otherwise(value)
    ]


def conform_inputs(artifact: Any, inputs: Any) -> None:
    """Gives the inputs of a compiled graph the layouts that :func:`attach` noted; must be called before it runs."""
    if (layouts := getattr(artifact, ATTRIBUTE, None)) and isinstance(inputs, list):
        conform(layouts, inputs)


def conforming(run: Callable[[list[Any]], Any], *, is_backward: bool) -> Callable[[list[Any]], Any]:
    """``run`` of a function that Inductor did not compile, with the input layouts of its first call."""
    layouts: list[Layout] | None = None

    def call(inputs: list[Any]) -> Any:
        nonlocal layouts
        if is_backward and layouts is None:
            layouts = layouts_of(inputs)
        elif hooks_were_set() and layouts is not None:
            conform(layouts, inputs)
        return run(inputs)

    return call


def conform(layouts: Sequence[tuple[Any, ...]], inputs: list[Any]) -> None:
    """Replaces each input with another layout by a copy with this one; an input of other sizes is not replaced."""
    for number, dtype, device, sizes, strides in layouts:
        value: Any = inputs[number] if number < len(inputs) else None
        if type(value) not in _PLAIN or value.dim() != len(strides) or (sizes is not None and value.shape != sizes):
            continue
        wanted = strides if sizes is not None else _dense_strides(value.shape, strides)
        is_alike = value.dtype is dtype and value.device == device and value.layout is torch.strided
        if not (is_alike and _are_alike(value.shape, value.stride(), wanted)) or _reads_otherwise(value):
            # Torch does not write to a tensor that repeats elements.
            once = tuple(slice(1) if stride == 0 else slice(None) for stride in wanted)
            with torch.no_grad():
                inputs[number] = torch.empty_strided(value.shape, wanted, dtype=dtype, device=device)
                inputs[number][once].copy_(value[once])


def _are_alike(sizes: Sequence[int], strides: Sequence[int], wanted: Sequence[int]) -> bool:
    """Whether strides are these, except in dimensions of fewer than two elements."""
    return all(size < 2 or one == other for size, one, other in zip(sizes, strides, wanted, strict=True))


def _reads_otherwise(value: torch.Tensor) -> bool:
    """Whether a tensor's elements differ from those in its memory."""
    return value.is_conj() or value.is_neg() or value._is_zerotensor()


def _dense_strides(sizes: Sequence[int], example: Sequence[int]) -> tuple[int, ...]:
    """Strides without gaps, in the order of the example's strides."""
    strides, step = [0] * len(sizes), 1
    for dim in sorted(range(len(sizes)), key=lambda dim: (example[dim], -dim)):
        strides[dim] = step
        step *= max(sizes[dim], 1)
    return tuple(strides)
