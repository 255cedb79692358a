"""Patch of ``torch._functorch._aot_autograd.aot_autograd_result``: what is known of a program that comes from a cache.

``wrap_post_compile`` runs where AOTAutograd's cache has a program, and puts its graphs to use without compiling: what
the compilation would have left in the tracing context, which of a forward's outputs a user sees among it, is then in
the cache's entry alone, and the context may tell it of another part of the same program that was compiled.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from .patch import Patch, Rebind

_MODULE = "torch._functorch._aot_autograd.aot_autograd_result"


def _wrap_post_compile(upstream: Callable[..., Any]) -> Callable[..., Any]:
    from pygraph_trees.trees.function import loaded_with

    @functools.wraps(upstream)
    def wrap_post_compile(self: Any, *args: Any, **kwargs: Any) -> Any:
        of_subclass = self.maybe_subclass_meta
        with loaded_with(self.runtime_metadata if of_subclass is None else of_subclass.fw_metadata):
            return upstream(self, *args, **kwargs)

    return wrap_post_compile


PATCHES: tuple[Patch, ...] = (
    Rebind(
        feature="trees",
        module=_MODULE,
        name="GenericAOTAutogradResult.wrap_post_compile",
        replace=_wrap_post_compile,
        removable="the tracing context tells the same of a program that comes from the cache",
    ),
)
