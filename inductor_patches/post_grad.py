"""Patch of ``torch._inductor.fx_passes.post_grad``: what moves constructors to the GPU is replaced by placement.

The name is looked up in the module when the passes run, behind the user's own ones and before the values of new nodes
are brought up to date.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from .patch import Patch, Rebind

_MODULE = "torch._inductor.fx_passes.post_grad"


def _move_constructors_to_gpu(upstream: Callable[..., Any]) -> Callable[..., Any]:
    from pygraph_trees.placement import place_for_graphs

    @functools.wraps(upstream)
    def move_constructors_to_gpu(graph: Any) -> None:
        if not place_for_graphs(graph, _has_addresses):
            upstream(graph)

    return move_constructors_to_gpu


def _has_addresses() -> bool:
    """Whether recordings are given addresses, or would be if there were a GPU."""
    from torch._inductor import cudagraph_trees

    from pygraph_trees.fake_gpu.presence import is_absent
    from pygraph_trees.indirection.availability import usable_driver
    from pygraph_trees.trees.recording import Recording

    return cudagraph_trees.CUDAGraphNode is Recording and (is_absent() or usable_driver() is not None)


PATCHES: tuple[Patch, ...] = (
    Rebind(
        feature="placement",
        module=_MODULE,
        name="move_constructors_to_gpu",
        replace=_move_constructors_to_gpu,
        removable="torch moves what the CPU computes for the GPU, and leaves what is returned where it is",
    ),
)
