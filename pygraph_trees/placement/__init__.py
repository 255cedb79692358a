"""Values that the CPU computes and the GPU needs are computed on the GPU or once, if that changes no result.

:func:`place` rewrites one graph, as it stands behind Inductor's post-grad passes; :func:`place_for_graphs` does so
where the flags ask for it, and leaves what was done with the graph's module.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from contextvars import ContextVar
from typing import TYPE_CHECKING

from pygraph_trees.report.records import PLACED, WHY_NOT_PLACED
from pygraph_trees.settings import Settings

from .moves import place
from .plan import Move, Placed, Stay

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import fx

__all__ = ["Move", "Placed", "Stay", "one_graph_deeper", "place", "place_for_graphs"]

_log = logging.getLogger("pygraph_trees.placement")
_depth: ContextVar[int] = ContextVar("pygraph_placement_depth", default=0)  # of graphs inside of graphs


@contextlib.contextmanager
def one_graph_deeper() -> Iterator[None]:
    """Inside, passes run over a graph and, again inside, over the branches and loops that it calls."""
    token = _depth.set(_depth.get() + 1)
    try:
        yield
    finally:
        _depth.reset(token)


def place_for_graphs(graph: fx.Graph, has_addresses: Callable[[], bool]) -> bool:
    """Rewrites a graph that is compiled for CUDA graphs; False where placement is off or nothing is to be graphed.

    In a branch or a loop's body nothing is staged: there are no nodes that could be given addresses. Nothing is folded
    there either.

    Args:
        has_addresses: whether a CUDA graph can be given the address of what it copies at each replay.
    """
    from torch._inductor import config

    settings = Settings.current()
    if settings.placement == "off" or not config.triton.cudagraphs:
        return False
    placed = Placed()
    try:
        inside = _depth.get() > 1
        stages = not inside and settings.indirection != "off" and not config.cpp_wrapper and has_addresses()
        place(graph, exact=settings.placement == "exact", stages=stages, folds=not inside, placed=placed)
    except Exception:
        # Each step leaves the graph as good as it was, so what was done so far stays.
        _log.warning("a graph could not be rewritten any further", exc_info=True)
        placed.why_not = "an error; see the log"
    if graph.owning_module is not None:
        graph.owning_module.meta[PLACED] = tuple(placed.records())
        graph.owning_module.meta[WHY_NOT_PLACED] = placed.why_not
    for move in placed.moves:
        _log.debug("%s: %s: %s", move.node, move.how.value, move.source)
    for stay in placed.stays:
        _log.debug("%s: stays: %s: %s", stay.node, stay.why, stay.source)
    return True
