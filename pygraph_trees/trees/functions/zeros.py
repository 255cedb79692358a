"""Tensors of zeros without memory, which autograd and programs may pass as tangents, and compiled code may return.

A replay copies such a tensor like any input. Upstream cannot warm up or record with one, and generated code would read
address 0. :func:`give_memory` therefore replaces it first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable


def give_memory(values: list[Any], indices: Iterable[int] | None = None) -> None:
    """Replaces inputs or outputs that are zeros without memory by zeros with memory.

    Args:
        indices: the values to look at; None for all.
    """
    for index in range(len(values)) if indices is None else indices:
        value = values[index]
        if isinstance(value, torch.Tensor) and value._is_zerotensor():
            with torch.no_grad():
                values[index] = value.clone()
