"""The memory format of convolutions on the fake GPU.

Torch asks its CUDA code, which queries the device and is missing in a CPU build. Without its answer, every convolution
is contiguous, and Inductor, which prefers channels last on a GPU, transposes around each one.
:func:`convolutions_by_cudnn` answers as a CUDA build with cuDNN does: by the formats of input and weight, except for
double precision.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
from torch._prims_common import suggest_memory_format

from .replacing import replaced

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def _select_backend(upstream: Callable[..., Any]) -> Callable[..., Any]:
    def select_backend(input: torch.Tensor, weight: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if input.device.type != "cuda" or input.numel() == 0:
            return upstream(input, weight, *args, **kwargs)
        return torch._C._ConvBackend.Cudnn

    return select_backend


def _memory_format(upstream: Callable[..., Any]) -> Callable[..., Any]:
    def memory_format(input: torch.Tensor, weight: torch.Tensor, backend: Any) -> Any:
        if input.device.type != "cuda":
            return upstream(input, weight, backend)
        channels_last = _CHANNELS_LAST.get(weight.dim())
        if torch.float64 in (input.dtype, weight.dtype) or channels_last is None:
            return torch.contiguous_format
        return (
            channels_last if channels_last in map(suggest_memory_format, (input, weight)) else torch.contiguous_format
        )

    return memory_format


@contextlib.contextmanager
def convolutions_by_cudnn() -> Iterator[None]:
    """Inside, fake CUDA convolutions have the memory format that cuDNN gives them."""
    names = ("_select_conv_backend", _select_backend), ("_conv_determine_backend_memory_format", _memory_format)
    with replaced([(torch._C, name, answer(getattr(torch._C, name))) for name, answer in names]):
        yield
