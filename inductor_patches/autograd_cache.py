"""Patch of ``torch._functorch._aot_autograd.aot_autograd_result``: programs that come from AOTAutograd's cache.

A compilation leaves AOTAutograd's metadata in the tracing context; for such a program, only the cache's entry has it.
The replacement keeps the metadata while the program's graphs are installed.
"""

from __future__ import annotations

from .patch import Patch, Rebind, made_by

PATCHES: tuple[Patch, ...] = (
    Rebind(
        feature="trees",
        module="torch._functorch._aot_autograd.aot_autograd_result",
        name="GenericAOTAutogradResult.wrap_post_compile",
        replace=made_by("pygraph_trees.trees.compiled_graph", "loading"),
        removable="the tracing context tells the same of a program that comes from the cache",
    ),
)
