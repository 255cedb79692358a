"""Patches of ``torch._inductor.compile_fx``.

Every whole graph and every partition goes through ``cudagraphify``, which becomes the drop-in's. The passes over a
graph are counted, so that placement knows a graph inside another one, and ``compile_fx`` compiles without CUDA graphs
if the flags say so.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .patch import Patch, Rebind

_MODULE = "torch._inductor.compile_fx"


def _cudagraphify(upstream: Callable[..., Any]) -> Callable[..., Any]:
    from pygraph_trees.trees.entry_points import cudagraphify

    return cudagraphify(upstream)


def _compile_fx(upstream: Callable[..., Any]) -> Callable[..., Any]:
    from pygraph_trees.selection import leaving_graphs_out

    return leaving_graphs_out(upstream)


def _recursive_post_grad_passes(upstream: Callable[..., Any]) -> Callable[..., Any]:
    from pygraph_trees.placement import counting_depth

    return counting_depth(upstream)


PATCHES: tuple[Patch, ...] = (
    Rebind(
        feature="placement",
        module=_MODULE,
        name="_recursive_post_grad_passes",
        replace=_recursive_post_grad_passes,
        removable="torch moves what the CPU computes for the GPU, and leaves what is returned where it is",
    ),
    Rebind(
        feature="placement",
        module=_MODULE,
        name="compile_fx",
        replace=_compile_fx,
        removable="never: torch has no flag that takes CUDA graphs from a program that asks for them",
    ),
    Rebind(
        feature="trees",
        module=_MODULE,
        name="cudagraphify",
        replace=_cudagraphify,
        removable="never: this is the drop-in",
    ),
)
