"""A fake GPU: lowers whole programs on fake tensors for a CUDA GPU of a named architecture.

``with absent_gpu("sm_90"):`` makes torch, Inductor and Triton act as if that GPU existed. :func:`lower` takes a program
through Dynamo, AOTAutograd, Inductor's passes, scheduling, graph partition and Triton code generation, and returns the
results. ``explain`` and the CPU tests rely on it. It works with builds of torch for the CPU and for CUDA, with and
without a GPU. README.md says how.
"""

from __future__ import annotations

from .architectures import ARCHITECTURES, DeviceProperties, UnknownArchitectureError
from .device_guard import NoDeviceGuardError
from .lowering import LoweredGraph, UnknownSizeError
from .presence import OtherArchitectureError, absent_gpu
from .tracing import NothingToLowerError, ValueNeededError, lower

__all__ = [
    "ARCHITECTURES",
    "DeviceProperties",
    "LoweredGraph",
    "NoDeviceGuardError",
    "NothingToLowerError",
    "OtherArchitectureError",
    "UnknownArchitectureError",
    "UnknownSizeError",
    "ValueNeededError",
    "absent_gpu",
    "lower",
]
