"""A GPU that is not there: lower whole programs for a CUDA GPU of a named architecture, on fake tensors.

``with absent_gpu("sm_90"):`` makes torch, Inductor and Triton believe in such a GPU; :func:`lower` takes a program
through Dynamo, AOTAutograd, Inductor's passes, scheduling, graph partition and Triton code generation for it, and
returns what came out. ``explain`` and the CPU tests rest on this. Builds of torch for the CPU and for CUDA will do,
with and without a GPU.
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
