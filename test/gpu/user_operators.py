"""Operators of the kind that users write, which hide addresses, or capture copies and fills.

Importing this module registers them. Indirection must notice that an address is hidden, and patch copies and fills.
"""

from __future__ import annotations

import ctypes

import torch


@torch.library.custom_op("pygraph_indirection_test::chunk_cat", mutates_args=())
def chunk_cat(xs: list[torch.Tensor]) -> torch.Tensor:
    """Passes the addresses of its inputs to its kernel in an array that is uploaded."""
    return torch._chunk_cat(xs, 0, 2)


@chunk_cat.register_fake
def _(xs: list[torch.Tensor]) -> torch.Tensor:
    return torch._chunk_cat(xs, 0, 2)


def call_driver(name, *args):
    status = getattr(ctypes.CDLL("libcuda.so.1"), name)(*args)
    if status != 0:
        raise RuntimeError(f"{name} returned {status}")


def current_stream():
    return ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)


@torch.library.custom_op("pygraph_indirection_test::host_call", mutates_args=())
def host_call(x: torch.Tensor) -> torch.Tensor:
    """Runs a host function that does nothing, ``free(NULL)``, between two steps."""
    if x.is_cuda:
        free = ctypes.cast(ctypes.CDLL(None).free, ctypes.c_void_p)
        call_driver("cuLaunchHostFunc", current_stream(), free, None)
    return x * 2


@host_call.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("pygraph_indirection_test::cloned", mutates_args=())
def cloned(x: torch.Tensor) -> torch.Tensor:
    """A copy from device to device."""
    return x.clone()


@cloned.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def library(x: torch.Tensor) -> torch.Tensor:
    """A library allocates the output, so it is in the graph pool."""
    return torch.ops.pygraph_indirection_test.cloned(x.sin())


@torch.library.custom_op("pygraph_indirection_test::zeroed", mutates_args=("x",))
def zeroed(x: torch.Tensor) -> None:
    """A fill by the driver; ``zero_`` launches a kernel."""
    nbytes = ctypes.c_size_t(x.numel() * x.element_size())
    call_driver("cuMemsetD8Async", ctypes.c_uint64(x.data_ptr()), ctypes.c_ubyte(0), nbytes, current_stream())
