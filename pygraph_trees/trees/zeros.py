"""Tensors of zeros without memory, which autograd and programs may pass as tangents.

A replay copies them like any input, but upstream cannot warm up or record with them, and generated code that is given
one reads address 0.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable


def give_memory(inputs: list[Any], indices: Iterable[int] | None = None) -> None:
    """Replaces inputs that are zeros without memory by zeros with memory.

    Args:
        indices: the inputs to look at; None for all.
    """
    for index in range(len(inputs)) if indices is None else indices:
        value = inputs[index]
        if isinstance(value, torch.Tensor) and value._is_zerotensor():
            with torch.no_grad():
                inputs[index] = value.clone()
