"""Patches of ``torch._inductor.compile_fx``.

Every whole graph and every partition goes through ``cudagraphify``, which the drop-in replaces. Nested passes over
graphs are counted, so placement recognizes a graph inside another one. ``compile_fx`` compiles without CUDA graphs if
the flags say so.
"""

from __future__ import annotations

from .patch import Patch, Rebind, made_by

_MODULE = "torch._inductor.compile_fx"


PATCHES: tuple[Patch, ...] = (
    Rebind(
        feature="placement",
        module=_MODULE,
        name="_recursive_post_grad_passes",
        replace=made_by("pygraph_trees.placement", "counting_depth"),
        removable="torch moves what the CPU computes for the GPU, and leaves what is returned where it is",
    ),
    Rebind(
        feature="placement",
        module=_MODULE,
        name="compile_fx",
        replace=made_by("pygraph_trees.selection.functions", "leaving_graphs_out"),
        removable="never: torch has no flag that takes CUDA graphs from a program that asks for them",
    ),
    Rebind(
        feature="trees",
        module=_MODULE,
        name="cudagraphify",
        replace=made_by("pygraph_trees.trees.entry_points", "cudagraphify"),
        removable="never: this is the drop-in",
    ),
)
