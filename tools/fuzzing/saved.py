"""Saved-tensor hooks of several kinds: values that autograd keeps for a backward come back equal, but in another form.

:func:`hooks` returns the context for a forward. Values stay the same bit for bit. Address, strides, device and dtype in
between depend on the kind. Tensors that a kind cannot handle stay unchanged.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

Hook = Callable[[Any], Any]


def hooks(kind: str, noticed: Callable[[str], None]) -> AbstractContextManager[Any]:
    """The context for a forward.

    Args:
        kind: one of :data:`around.SAVED`.
        noticed: called with ``"pack"`` and ``"unpack"`` when the hooks run.
    """
    pack, unpack = _PAIRS[kind]

    def packing(tensor: torch.Tensor) -> Any:
        packed = pack(tensor)
        noticed("pack")
        return packed

    def unpacking(packed: Any) -> torch.Tensor:
        noticed("unpack")
        return unpack(packed)

    return torch.autograd.graph.saved_tensors_hooks(packing, unpacking)


def _same(value: Any) -> Any:
    return value


def _on_cpu(pinned: bool) -> tuple[Hook, Hook]:
    def pack(tensor: torch.Tensor) -> Any:
        if not pinned:
            return tensor.device, tensor.detach().to("cpu", copy=True)
        memory = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=torch.cuda.is_available())
        return tensor.device, memory.copy_(tensor.detach())

    def unpack(packed: Any) -> torch.Tensor:
        device, tensor = packed
        return tensor.to(device, non_blocking=pinned)

    return pack, unpack


def _to_double(tensor: torch.Tensor) -> Any:
    wide = tensor.detach().to(torch.float64, copy=True) if tensor.is_floating_point() else tensor
    return tensor.dtype, wide


def _transposed(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.transpose(-1, -2).contiguous().transpose(-1, -2) if tensor.dim() >= 2 else tensor.clone()


_PAIRS: dict[str, tuple[Hook, Hook]] = {
    "identity": (_same, _same),
    "clone": (_same, torch.clone),
    "cpu": _on_cpu(pinned=False),
    "pinned": _on_cpu(pinned=True),
    "float64": (_to_double, lambda packed: packed[1].to(packed[0])),
    "contiguous": (_same, lambda tensor: tensor.contiguous()),
    "transposed": (_same, _transposed),
}
