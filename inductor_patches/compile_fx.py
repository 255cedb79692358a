"""Patches of ``torch._inductor.compile_fx``: ``cudagraphify``, through which every whole graph and every partition
passes, the passes over a graph and the graphs inside of it, which placement tells apart, and ``compile_fx`` itself,
which compiles without CUDA graphs if the flags say "never".

``cudagraphify`` runs while compiling, where values given by ``mode=`` and ``options=`` hold, so the settings of a
function are taken here.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from .patch import Patch, Rebind

_MODULE = "torch._inductor.compile_fx"


def _cudagraphify(upstream: Callable[..., Any]) -> Callable[..., Any]:
    from pygraph_trees.trees.choice import chooser
    from pygraph_trees.trees.function import FunctionModel, entered

    @functools.wraps(upstream)
    def cudagraphify(model: Any, static_input_idxs: Any = (), *args: Any, **kwargs: Any) -> Any:
        function = FunctionModel.of(model, is_backward=kwargs["is_backward"], is_inference=kwargs["is_inference"])
        choose = chooser(static_input_idxs, kwargs.get("mutated_input_idxs", ()), kwargs["device_index"])
        return entered(function, upstream(function, static_input_idxs, *args, **kwargs), choose)

    return cudagraphify


def _compile_fx(upstream: Callable[..., Any]) -> Callable[..., Any]:
    from torch._inductor import config

    from pygraph_trees.selection import always_without_graphs, compiling_without_graphs, without_graphs
    from pygraph_trees.settings import Settings

    signature = inspect.signature(upstream)

    @functools.wraps(upstream)
    def compile_fx(*args: Any, **kwargs: Any) -> Any:
        call = signature.bind(*args, **kwargs)
        call.apply_defaults()
        given = call.arguments["config_patches"]
        with config.patch(given or {}):
            patches = without_graphs(Settings.current(), given) if config.triton.cudagraphs else None
        if patches is None:
            return upstream(*args, **kwargs)
        call.arguments["config_patches"] = patches
        call.arguments["inner_compile"] = always_without_graphs(call.arguments["inner_compile"])
        with compiling_without_graphs():
            return upstream(*call.args, **call.kwargs)

    return compile_fx


def _recursive_post_grad_passes(upstream: Callable[..., Any]) -> Callable[..., Any]:
    from pygraph_trees.placement import one_graph_deeper

    @functools.wraps(upstream)
    def recursive_post_grad_passes(gm: Any, *args: Any, **kwargs: Any) -> None:
        with one_graph_deeper():
            upstream(gm, *args, **kwargs)

    return recursive_post_grad_passes


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
