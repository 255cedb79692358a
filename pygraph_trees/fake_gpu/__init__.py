"""A fake GPU: lowers whole programs on fake tensors for a CUDA GPU of a named architecture.

``with absent_gpu("sm_90"):`` makes torch, Inductor and Triton act as if that GPU existed, on builds for the CPU and for
CUDA. :func:`lower` takes a program up to Triton's source. README.md says how.
"""

from __future__ import annotations

from .lowering import LoweredGraph
from .presence import absent_gpu
from .tracing import ValueNeededError, lower

__all__ = ["LoweredGraph", "ValueNeededError", "absent_gpu", "lower"]
