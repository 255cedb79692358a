"""Prepares tensors that upstream cannot record: outputs on live inputs, on the CPU, conjugated or negated, and zeros.

An output on a live input is noted in ``live.outputs`` and rebuilt from the input of each call. Upstream takes no output
on the CPU, so it is given None in its place. Upstream forgets that a tensor is conjugated or negated, so it is given a
resolved copy.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Container, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from pygraph_trees.cuda.extent import flat

if TYPE_CHECKING:
    from pygraph_trees.indirection.inputs import LiveInputs


def is_on_live_input(live: LiveInputs, position: int, output: torch.Tensor) -> bool:
    """Whether an output is on a live input; if so, it is noted in ``live.outputs`` with its view of the input."""
    if (item := live.storages.get(output.untyped_storage().data_ptr())) is None:
        return False
    view = None  # the whole input; otherwise sizes, strides, offset from the input's first element, and dtype
    if output is not item.placeholder_tensor:
        ahead = output.data_ptr() - item.placeholder_tensor.data_ptr() if output.numel() else 0
        view = tuple(output.shape), tuple(output.stride()), ahead // output.element_size(), output.dtype
    live.outputs[position] = item.index, view
    return True


def makers_of_empty(
    outputs: Sequence[torch.Tensor | None], rebuilt: Container[int]
) -> dict[int, Callable[[], torch.Tensor]]:
    """By position, functions that make a new output like each one without elements and memory that is not rebuilt."""
    return {
        position: functools.partial(
            torch.empty_strided, output.size(), output.stride(), dtype=output.dtype, device=output.device
        )
        for position, output in enumerate(outputs)
        if output is not None
        and position not in rebuilt
        and output.numel() == 0
        and output.untyped_storage().data_ptr() == 0
    }


def without_staged(outputs: Sequence[Any], live: LiveInputs) -> list[Any]:
    """The outputs for upstream, with None for outputs on staged inputs, which are on the CPU."""
    shown = list(outputs)
    for position, output in enumerate(outputs):
        if isinstance(output, torch.Tensor) and output.is_cpu and is_on_live_input(live, position, output):
            shown[position] = None
    return shown


def as_they_read(outputs: Any) -> Any:
    """The outputs, resolved if they are conjugated or negated."""
    if isinstance(outputs, torch.Tensor):
        return as_it_reads(outputs)
    resolved = [as_it_reads(output) for output in outputs]
    return outputs if all(map(operator.is_, resolved, outputs)) else resolved


def as_it_reads(value: Any) -> Any:
    """A resolved copy with the same strides; anything but a conjugated or negated tensor is returned itself."""
    if not isinstance(value, torch.Tensor) or not (value.is_conj() or value.is_neg()) or not value.numel():
        return value
    return flat(value).resolve_conj().resolve_neg().as_strided(value.shape, value.stride(), 0)


def each_once(gradients: Sequence[Any]) -> list[Any]:
    """The gradients of a recorded or watched run; if a tensor appears again, a clone takes its place there.

    Replays return a tensor for each place. Autograd takes each over as a parameter's gradient, to which it adds later.
    """
    made, seen = list(gradients), set()
    for place, one in enumerate(gradients):
        if id(one) in seen:
            made[place] = one.clone()
        elif isinstance(one, torch.Tensor):
            seen.add(id(one))
    return made


def give_memory(values: list[Any], indices: Iterable[int] | None = None) -> None:
    """Replaces inputs or outputs, or those at ``indices``, that are zeros without memory by zeros with memory.

    Autograd and programs may pass such tensors as tangents, and compiled code may return them. Upstream cannot warm up
    or record with one, and generated code would read address 0. A replay copies them like any input.
    """
    for index in range(len(values)) if indices is None else indices:
        value = values[index]
        if isinstance(value, torch.Tensor) and value._is_zerotensor():
            with torch.no_grad():
                values[index] = value.clone()
