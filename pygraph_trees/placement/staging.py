"""The operator by which a compiled graph takes a tensor of the CPU: Inductor leaves it in the graph's GPU part.

``pygraph_trees::staged`` copies a tensor to the GPU on which another one lies. Inductor cuts a graph at its own copies
between devices; it does not know what this one does, so the copy is part of the partition that needs it, and of the
CUDA graph that is captured.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import torch

from pygraph_trees.host_reads import HostRead

_library = torch.library.Library("pygraph_trees", "DEF")
# Inductor takes the first tensor's device for the operator's.
_library.define("staged(Tensor there, Tensor host, int read=1) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
_observed = threading.local()


@contextlib.contextmanager
def observed() -> Iterator[list[tuple[int, HostRead]]]:
    """What is staged inside, in this thread: the address of each tensor on the CPU, and when the program reads it."""
    outer = getattr(_observed, "found", None)
    found: list[tuple[int, HostRead]] = []
    _observed.found = found
    try:
        yield found
    finally:
        _observed.found = outer


def _staged(there: torch.Tensor, host: torch.Tensor, read: int = HostRead.IN_ORDER) -> torch.Tensor:
    found = getattr(_observed, "found", None)
    if found is not None:
        found.append((host.data_ptr(), HostRead(read)))
    # A tensor that lies on the GPU already is an input that was copied while a graph was recorded. Outside of graphs
    # that we record the copy is waited for: the program may write to its tensor as soon as the call is done. So torch
    # raises in graphs of the program's own, which would read memory that nobody holds.
    return _like(there, host).copy_(host, non_blocking=found is not None and _is_captured(there))


def _is_captured(there: torch.Tensor) -> bool:
    return there.is_cuda and torch.cuda.is_current_stream_capturing()


def _like(there: torch.Tensor, host: torch.Tensor, read: int = HostRead.IN_ORDER) -> torch.Tensor:
    return torch.empty_like(host, device=there.device)  # of the same strides where they are dense


_library.impl("staged", _staged, "CPU")
_library.impl("staged", _staged, "CUDA")
torch.library.register_fake("pygraph_trees::staged", _like, lib=_library)

staged = torch.ops.pygraph_trees.staged.default
