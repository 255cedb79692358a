"""Wraps upstream's methods that load a compiled graph from a cache, put it to use, and call it.

Each function takes upstream's method and returns its replacement, which calls upstream's, except for a call that a fast
replay answers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch._inductor import debug
from torch._inductor.utils import BoxedBool
from torch.autograd import profiler

from pygraph_trees.native import binding
from pygraph_trees.report import compiled
from pygraph_trees.report.naming import BACKWARD
from pygraph_trees.selection.functions import are_graphs_left_out, has_own_policy, why_not_graphed, why_overridden
from pygraph_trees.settings import Settings

from ..functions.function import loaded_with
from . import saved_tensors
from .choice import as_upstream_has_it
from .runner import shortened
from .saved_tensors import conform_inputs, hooks_were_set, is_any_lazy


def loading(upstream: Callable[..., Any]) -> Callable[..., Any]:
    """Remembers AOTAutograd's metadata of a program loaded from its cache while the program's graphs are put to use.

    A compilation leaves the metadata in the tracing context. For a program from the cache, only the cache entry has
    it; the context may describe another part of the same program, which was compiled.
    """

    @functools.wraps(upstream)
    def wrap_post_compile(self: Any, *args: Any, **kwargs: Any) -> Any:
        of_subclass = self.maybe_subclass_meta
        with loaded_with(self.runtime_metadata if of_subclass is None else of_subclass.fw_metadata):
            return upstream(self, *args, **kwargs)

    return wrap_post_compile


def putting_to_use(upstream: Callable[..., Any]) -> Callable[..., Any]:
    """Decides whether CUDA graphs are used for a graph, reports it, and shortens the code around its only partition."""

    @functools.wraps(upstream)
    def post_compile(self: Any, example_inputs: Any, constants: Any, graph_kwargs: Any) -> None:
        wanted = bool(graph_kwargs["cudagraphs"]) or are_graphs_left_out()
        settings = Settings.current()
        reason = why_not_graphed(settings) if wanted else None
        is_ours = settings.indirection != "off" and not has_own_policy()
        if wanted and reason is None and is_ours:
            reason = compiled.why_not_replayed(self)
        if reason is None and settings.indirection != "off":
            reason = why_overridden(is_backward=graph_kwargs["is_backward"])
            wanted = wanted or reason is not None  # torch forgets a backward's override if it comes from its cache
        if reason is not None:
            BoxedBool.disable(graph_kwargs["cudagraphs"])
        with compiled.put_to_use(self, graph_kwargs, wanted=wanted, dropped=reason):
            upstream(self, example_inputs, constants, graph_kwargs)
        index = graph_kwargs.get("boxed_forward_device_index")
        if reason is not None and graph_kwargs["is_backward"] and index is not None and index.value is not None:
            self.current_callable = as_upstream_has_it(self.current_callable, BACKWARD, index.value)
        if graph_kwargs["cudagraphs"] and is_ours:
            self.current_callable = shortened(self.current_callable) or self.current_callable
        else:
            saved_tensors.leave(self)

    return post_compile


def calling(upstream: Callable[..., Any]) -> Callable[..., Any]:
    """Gives inputs the layout that was compiled for, and skips upstream's call if a fast replay gives the outputs."""
    if binding.extension is not None:
        call: Callable[..., Any] = binding.extension.Call(
            upstream=upstream, profiler=vars(profiler), debug=vars(debug), conform_inputs=conform_inputs
        )
        return call

    @functools.wraps(upstream)
    def __call__(self: Any, inputs: Any) -> Any:
        if hooks_were_set() or is_any_lazy(inputs):
            conform_inputs(self, inputs)
        return upstream(self, inputs)

    return __call__
