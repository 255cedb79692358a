"""Patches of ``torch._inductor.output_code``: what a compiled graph is known by, and whether it is graphed.

``CompiledFxGraph.__init__`` runs where a graph is compiled, and its attributes travel through the FX and AOTAutograd
caches; ``post_compile`` runs where it is put to use, compiled or loaded, and there the code around a graph's only
partition is shortened. ``CompiledFxGraph.__call__`` runs at each call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from .patch import Patch, Rebind

_MODULE = "torch._inductor.output_code"


def _init(upstream: Callable[..., Any]) -> Callable[..., Any]:
    from torch._inductor import config

    from pygraph_trees.report import compiled
    from pygraph_trees.trees import saved_tensors

    @functools.wraps(upstream)
    def __init__(self: Any, current_callable: Any, graph: Any, gm: Any, *args: Any, **kwargs: Any) -> None:
        upstream(self, current_callable, graph, gm, *args, **kwargs)
        compiled.attach(self, graph, gm)
        if config.triton.cudagraphs:
            saved_tensors.attach(self, graph)

    return __init__


def _post_compile(upstream: Callable[..., Any]) -> Callable[..., Any]:
    from torch._inductor.utils import BoxedBool

    from pygraph_trees.report import compiled
    from pygraph_trees.selection import are_graphs_left_out, why_not_graphed
    from pygraph_trees.settings import Settings
    from pygraph_trees.trees import saved_tensors
    from pygraph_trees.trees.runner import shortened

    @functools.wraps(upstream)
    def post_compile(self: Any, example_inputs: Any, constants: Any, graph_kwargs: Any) -> None:
        wanted = bool(graph_kwargs["cudagraphs"]) or are_graphs_left_out()
        reason = why_not_graphed(Settings.current()) if wanted else None
        if reason is not None:
            BoxedBool.disable(graph_kwargs["cudagraphs"])
        with compiled.put_to_use(self, graph_kwargs, wanted=wanted, dropped=reason):
            upstream(self, example_inputs, constants, graph_kwargs)
        if graph_kwargs["cudagraphs"] and Settings.current().indirection != "off":
            self.current_callable = shortened(self.current_callable) or self.current_callable
        else:
            saved_tensors.leave(self)

    return post_compile


def _call(upstream: Callable[..., Any]) -> Callable[..., Any]:
    from torch._inductor import debug
    from torch.autograd import profiler

    from pygraph_trees.native.tensors import native
    from pygraph_trees.trees.saved_tensors import hooks_were_set, look_after

    if native is not None:  # the same in C++
        return native.Call(upstream, vars(profiler), vars(debug), look_after)

    @functools.wraps(upstream)
    def __call__(self: Any, inputs: Any) -> Any:
        if hooks_were_set():
            look_after(self, inputs)
        # Around a call upstream ends what compiling left open, and notes the call for the profiler and for debugging.
        fast_call = getattr(self.current_callable, "fast_call", None)
        if fast_call is not None and not profiler._is_profiler_enabled and not debug.RECORD_GRAPH_EXECUTION:
            outputs = fast_call(inputs)
            if outputs is not None:
                return outputs
        return upstream(self, inputs)

    return __call__


PATCHES: tuple[Patch, ...] = (
    Rebind(
        feature="coverage",
        module=_MODULE,
        name="CompiledFxGraph.__init__",
        replace=_init,
        removable="torch reports why it splits a graph as data",
    ),
    Rebind(
        feature="trees",
        module=_MODULE,
        name="CompiledFxGraph.post_compile",
        replace=_post_compile,
        removable="never: this is the drop-in",
    ),
    Rebind(
        feature="trees",
        module=_MODULE,
        name="CompiledFxGraph.__call__",
        replace=_call,
        removable="never: this is the drop-in",
    ),
)
