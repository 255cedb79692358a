"""Computes CPU values that the GPU needs: on the GPU, or once at compile time, if no result changes.

:func:`place_for_graphs` rewrites a post-grad graph if the flags ask for it, and stores a record in the graph module's
``meta``. An error is logged and leaves a valid graph. README.md explains the choices.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from pygraph_trees.reasons import Reason
from pygraph_trees.report.records import LEFT_ALONE, PLACED, WHY_NOT_PLACED
from pygraph_trees.settings import Settings

from .moves import place
from .plan import Placed

if TYPE_CHECKING:
    from torch import fx

_log = logging.getLogger("pygraph_trees.placement")
_depth: ContextVar[int] = ContextVar("pygraph_placement_depth", default=0)  # 2 or more: in a branch or loop


def placing(upstream: Callable[..., Any], has_addresses: Callable[[], bool]) -> Callable[..., Any]:
    """Takes the place of ``move_constructors_to_gpu``, which runs only if :func:`place_for_graphs` did nothing."""

    @functools.wraps(upstream)
    def move_constructors_to_gpu(graph: fx.Graph) -> None:
        if not place_for_graphs(graph, has_addresses):
            upstream(graph)

    return move_constructors_to_gpu


def counting_depth(upstream: Callable[..., Any]) -> Callable[..., Any]:
    """``_recursive_post_grad_passes``, which runs over a graph and then over the branches and loops that it calls."""

    @functools.wraps(upstream)
    def recursive_post_grad_passes(gm: Any, *args: Any, **kwargs: Any) -> None:
        token = _depth.set(_depth.get() + 1)
        try:
            upstream(gm, *args, **kwargs)
        finally:
            _depth.reset(token)

    return recursive_post_grad_passes


def place_for_graphs(graph: fx.Graph, has_addresses: Callable[[], bool]) -> bool:
    """Rewrites a graph that is compiled for CUDA graphs; returns False if it is left alone.

    In the body of a branch or a loop nothing is folded or staged: no node there can be given an address.
    """
    from torch._inductor import config

    settings = Settings.current()
    is_left_alone = LEFT_ALONE in getattr(graph.owning_module, "meta", ())  # it could not be compiled
    if settings.placement == "off" or not config.triton.cudagraphs or is_left_alone:
        return False
    placed, inside = Placed(), _depth.get() > 1
    # Graphs without trees are captured by torch alone.
    by_address = settings.indirection != "off" and config.triton.cudagraph_trees and not config.cpp_wrapper
    try:
        stages = not inside and by_address and has_addresses()
        place(graph, exact=settings.placement == "exact", stages=stages, folds=not inside, placed=placed)
    except Exception:
        # Each step leaves a valid graph, so the steps before the error stay.
        _log.warning("a graph could not be rewritten any further", exc_info=True)
        placed.why_not = Reason.ERROR()
    if graph.owning_module is not None:
        graph.owning_module.meta[PLACED] = tuple(placed.records())
        graph.owning_module.meta[WHY_NOT_PLACED] = placed.why_not
    return True
