"""Chooses the kernels of attention and the memory format of convolutions as torch would on the fake GPU.

:func:`chosen_attention` follows torch's ``aten/src/ATen/native/transformers/cuda/sdp_utils.cpp``, and obeys
``sdpa_kernel``. :func:`convolutions_by_cudnn` answers as a CUDA build with cuDNN does. README.md says why.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._prims_common import suggest_memory_format

from .replacing import replaced

_aten = torch.ops.aten
_KEY = torch._C.DispatchKey.CompositeImplicitAutograd
_MASK_ALIGNMENT = 8  # elements, of all strides of the mask but the last
_FLASH_ALIGNMENT = 8  # elements of the head dimension; others are padded
_FLASH_MAX_HEAD_DIM = 256
_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def _flash_fits(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool) -> bool:
    return (
        torch.backends.cuda.flash_sdp_enabled()
        and query.dtype in (torch.float16, torch.bfloat16)
        and mask is None
        and query.size(-1) == key.size(-1) == value.size(-1)
        and query.size(-1) <= _FLASH_MAX_HEAD_DIM
        and (not is_causal or query.size(-2) == key.size(-2))
    )


def _efficient_fits(query: Tensor, key: Tensor, value: Tensor) -> bool:
    alignment = 16 // query.element_size()
    return (
        torch.backends.cuda.mem_efficient_sdp_enabled()
        and query.dtype in (torch.float16, torch.bfloat16, torch.float32)
        and query.size(1) == key.size(1) == value.size(1)
        and query.size(-1) % alignment == 0
        and value.size(-1) % alignment == 0
    )


def _efficient_bias(mask: Tensor | None, query: Tensor, key: Tensor) -> Tensor | None:
    """The mask as the additive, aligned and expanded bias that the memory-efficient kernel takes."""
    if mask is None:
        return None
    if mask.dtype == torch.bool:
        mask = torch.where(mask, torch.zeros((), dtype=query.dtype, device=mask.device), float("-inf"))
    width = mask.size(-1)
    if mask.stride(-1) != 1 or any(s % _MASK_ALIGNMENT for s in mask.stride()[:-1]):
        mask = torch.nn.functional.pad(mask, (0, -width % _MASK_ALIGNMENT))[..., :width]
    return mask.expand(query.size(0), query.size(1), query.size(2), key.size(2))


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    given = (query, key, value, attn_mask, dropout_p, is_causal)
    if query.device.type != "cuda":
        return _aten.scaled_dot_product_attention.default._op_dk(_KEY, *given, scale=scale, enable_gqa=enable_gqa)
    tensors = (query, key, value)
    fusable = all(t.dim() == 4 and t.dtype == query.dtype and t.numel() > 0 and t.stride(-1) == 1 for t in tensors)
    if fusable and _flash_fits(query, key, value, attn_mask, is_causal):
        head_dim = query.size(-1)
        scale = head_dim**-0.5 if scale is None else scale
        if missing := -head_dim % _FLASH_ALIGNMENT:
            query, key, value = (torch.nn.functional.pad(t, (0, missing)) for t in tensors)
        out = _aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, False, scale=scale)[0]
        return out[..., :head_dim] if missing else out
    if fusable and not enable_gqa and _efficient_fits(query, key, value):
        for_backward = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
        bias = _efficient_bias(attn_mask, query, key)
        return _aten._scaled_dot_product_efficient_attention(
            query, key, value, bias, for_backward, dropout_p, is_causal, scale=scale
        )[0]
    return _aten._scaled_dot_product_attention_math(*given, None, scale=scale, enable_gqa=enable_gqa)[0]


@contextlib.contextmanager
def chosen_attention() -> Iterator[None]:
    op = _aten.scaled_dot_product_attention.default
    before = op.py_kernels.get(_KEY)
    op._dispatch_cache.clear()
    op.py_kernels[_KEY] = _attention
    try:
        yield
    finally:
        if before is None:
            del op.py_kernels[_KEY]
        else:
            op.py_kernels[_KEY] = before
        op._dispatch_cache.clear()


def _select_backend(upstream: Callable[..., Any], input: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Any:
    if input.device.type != "cuda" or input.numel() == 0:
        return upstream(input, weight, *args, **kwargs)
    return torch._C._ConvBackend.Cudnn


def _memory_format(upstream: Callable[..., Any], input: Tensor, weight: Tensor, backend: Any) -> Any:
    if input.device.type != "cuda":
        return upstream(input, weight, backend)
    channels_last = _CHANNELS_LAST.get(weight.dim())
    can_be_last = channels_last is not None and torch.float64 not in (input.dtype, weight.dtype)
    is_last = can_be_last and channels_last in map(suggest_memory_format, (input, weight))
    return channels_last if is_last else torch.contiguous_format


def convolutions_by_cudnn() -> contextlib.AbstractContextManager[None]:
    names = ("_select_conv_backend", _select_backend), ("_conv_determine_backend_memory_format", _memory_format)
    return replaced([(torch._C, name, partial(answer, getattr(torch._C, name))) for name, answer in names])
