"""Patch of ``torch._functorch._aot_autograd.aot_autograd_result``: a program that comes from AOTAutograd's cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .patch import Patch, Rebind


def _wrap_post_compile(upstream: Callable[..., Any]) -> Callable[..., Any]:
    from pygraph_trees.trees.compiled_graph import loading

    return loading(upstream)


PATCHES: tuple[Patch, ...] = (
    Rebind(
        feature="trees",
        module="torch._functorch._aot_autograd.aot_autograd_result",
        name="GenericAOTAutogradResult.wrap_post_compile",
        replace=_wrap_post_compile,
        removable="the tracing context tells the same of a program that comes from the cache",
    ),
)
