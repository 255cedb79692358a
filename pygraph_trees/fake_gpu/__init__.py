"""A fake GPU: lowers whole programs on fake tensors for a CUDA GPU of a named architecture.

``with absent_gpu("sm_90"):`` makes torch, Inductor and Triton act as if that GPU existed. :func:`lower` takes a program
through Dynamo, AOTAutograd, Inductor's passes, scheduling, graph partition and Triton code generation, and returns the
results. ``explain`` and the CPU tests rely on it. It works with builds of torch for the CPU and for CUDA, with and
without a GPU. README.md says how.
"""

from __future__ import annotations

from .architectures import ARCHITECTURES, UnknownArchitectureError
from .lowering import LoweredGraph
from .presence import OtherArchitectureError, absent_gpu
from .tracing import NothingToLowerError, ValueNeededError, lower

__all__ = [
    "ARCHITECTURES",
    "LoweredGraph",
    "NothingToLowerError",
    "OtherArchitectureError",
    "UnknownArchitectureError",
    "ValueNeededError",
    "absent_gpu",
    "lower",
]
