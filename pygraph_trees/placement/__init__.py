"""Computes CPU values that the GPU needs: on the GPU, or once at compile time, if no result changes.

:func:`placing` rewrites a post-grad graph if the flags ask for it, and stores a record in the graph module's ``meta``.
What cannot be compiled then is compiled without (:func:`trying`). README.md explains the choices.
"""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from torch import fx

from pygraph_trees.reasons import Reason
from pygraph_trees.report.records import PLACED, WHY_NOT_PLACED
from pygraph_trees.settings import Settings

from .moves import place
from .nodes import is_on_cpu

_log = logging.getLogger("pygraph_trees.placement")
_outermost: ContextVar[fx.GraphModule | None] = ContextVar("pygraph_outermost", default=None)  # that is to be rewritten


def trying(upstream: Callable[..., Any]) -> Callable[..., Any]:
    """``fx_codegen_and_compile``; if it raises for a graph with CPU values, compiles the graph again without placement.

    Inductor cannot compile some graphs for one device that it can compile for two.
    """
    from torch._inductor import config

    @functools.wraps(upstream)
    def fx_codegen_and_compile(gm: fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        modules = [module for module in gm.modules() if isinstance(module, fx.GraphModule)]
        is_asked = Settings.current().placement != "off" and config.triton.cudagraphs
        is_placed = is_asked and any(is_on_cpu(node) for module in modules for node in module.graph.nodes)
        before = [copy.deepcopy(module.graph) for module in modules] if is_placed else []
        token = _outermost.set(gm if is_placed else None)
        try:
            return upstream(gm, *args, **kwargs)
        except Exception:
            if not is_placed:
                raise
            _log.warning("a graph is compiled again, without placement", exc_info=True)
        finally:
            _outermost.reset(token)
        for module, graph in zip(modules, before, strict=True):
            module.graph = graph
            module.meta.update({PLACED: (), WHY_NOT_PLACED: Reason.ERROR()})
        with config.patch({"triton.pygraph_placement": "off"}):
            return fx_codegen_and_compile(gm, *args, **kwargs)

    return fx_codegen_and_compile


def placing(upstream: Callable[..., Any], has_addresses: Callable[[], bool]) -> Callable[..., Any]:
    """Takes the place of ``move_constructors_to_gpu``, which runs if placement or CUDA graphs are off.

    In the body of a branch or a loop nothing is folded or staged: no node there can be given an address.
    """
    from torch._inductor import config

    @functools.wraps(upstream)
    def move_constructors_to_gpu(graph: fx.Graph) -> None:
        if (outermost := _outermost.get()) is None:
            return upstream(graph)
        settings = Settings.current()
        module: Any = graph.owning_module
        # Graphs without trees are captured by torch alone.
        by_address = settings.indirection != "off" and config.triton.cudagraph_trees and not config.cpp_wrapper
        stages = module is outermost and by_address and has_addresses()
        placed = place(graph, exact=settings.placement == "exact", stages=stages, folds=module is outermost)
        module.meta.update({PLACED: tuple(placed.records()), WHY_NOT_PLACED: placed.why_not})

    return move_constructors_to_gpu
