"""Compiles a graph again, in another way, if Inductor cannot compile it as placed, or if it would lose values.

:func:`trying` makes the attempts. Between two of them, the graph becomes again what it was, with all graphs in it.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
import traceback
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any

from torch import fx
from torch._dynamo.exc import ShortenTraceback, SkipFrame
from torch._inductor import config, ir
from torch._inductor.virtualized import V

from pygraph_trees.errors import PygraphError
from pygraph_trees.reasons import Reason
from pygraph_trees.report.records import LEFT_ALONE, PLACED, WHY_NOT_PLACED
from pygraph_trees.settings import may_wait_for_others

_log = logging.getLogger("pygraph_trees.compiling")
# Whether partitions that would write to one tensor become one; otherwise a TornError is raised. None: nobody would try
# again.
_merges: ContextVar[bool | None] = ContextVar("pygraph_merges", default=None)
_CHILDREN = ("_modules", "_parameters", "_buffers")


class TornError(PygraphError):
    """Several partitions write to the result of one ``torch.cat``."""

    template = "several partitions write to the result of one torch.cat"


def trying(upstream: Callable[..., Any]) -> Callable[..., Any]:
    """``fx_codegen_and_compile`` for CUDA graphs, again without what it stumbled over.

    After a :class:`TornError`, one kernel computes each ``torch.cat``; if that cannot be compiled, nothing is graphed.
    After any other error, nothing is placed, since Inductor cannot compile some graphs for one device that it can
    compile for two. If no attempt is left, the first error is raised. With several ranks, none compiles again alone:
    passes of Inductor's and the program's may wait for the others.
    """

    @functools.wraps(upstream)
    def fx_codegen_and_compile(gm: fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        if not config.triton.cudagraphs:
            return upstream(gm, *args, **kwargs)
        modules = [module for module in gm.modules() if isinstance(module, fx.GraphModule)]
        before = [(_state_of(vars(module)), copy.deepcopy(module.graph)) for module in modules]
        is_alone, copies, places = not may_wait_for_others(), False, True
        merges, first = not is_alone, None
        try:
            while True:
                token = _merges.set(merges)
                try:
                    with config.patch(force_pointwise_cat=True) if copies else contextlib.nullcontext():
                        return upstream(gm, *args, **kwargs)
                except TornError:
                    copies, merges = not copies, copies
                except (ShortenTraceback, SkipFrame):
                    raise
                except Exception as error:
                    if copies:
                        copies, merges, what = False, True, "with one kernel for each torch.cat"
                    elif places and is_alone and any(module.meta.get(PLACED) for module in modules):
                        places, what = False, "with placement"
                    elif first is not None:
                        raise first from error
                    else:
                        raise
                    _log.warning("a graph cannot be compiled %s, and is compiled without", what, exc_info=True)
                    traceback.clear_frames(error.__traceback__)  # they hold all that was compiled
                    first = first or error
                finally:
                    _merges.reset(token)
                for module, (state, graph) in zip(modules, before, strict=True):
                    vars(module).clear()
                    vars(module).update(_state_of(state))
                    module.graph = copy.deepcopy(graph)
                    if not places:
                        module.meta.update({LEFT_ALONE: True, WHY_NOT_PLACED: Reason.ERROR()})
        finally:
            first = None  # its frames hold this one

    return fx_codegen_and_compile


def _state_of(attributes: dict[str, Any]) -> dict[str, Any]:
    """A copy of a module's attributes, with all that a compilation adds to or takes from."""
    return attributes | {name: dict(attributes[name]) for name in (*_CHILDREN, "meta")}


def keeping_whole(upstream: Callable[..., Any]) -> Callable[..., Any]:
    """``Scheduler.get_graph_partition_signature``; partitions that write to one tensor are merged, or compiled again.

    Each partition allocates what it writes to, so the result of ``torch.cat`` would only have the last one's values.
    """

    @functools.wraps(upstream)
    def get_graph_partition_signature(self: Any, partitions: list[Any], skip_cudagraphs: list[bool]) -> Any:
        if (merges := _merges.get()) is not None and _is_torn(partitions, skip_cudagraphs):
            if not merges:
                raise TornError()
            _log.warning("%s: nothing of this graph is graphed", TornError.template)
            partitions[:], skip_cudagraphs[:] = [[node for nodes in partitions for node in nodes]], [True]
        return upstream(self, partitions=partitions, skip_cudagraphs=skip_cudagraphs)

    return get_graph_partition_signature


def _is_torn(partitions: Sequence[Sequence[Any]], skip_cudagraphs: Sequence[bool]) -> bool:
    places: dict[str, set[int | None]] = defaultdict(set)  # of what writes to a result; None: outside of CUDA graphs
    for index, (nodes, skip) in enumerate(zip(partitions, skip_cudagraphs, strict=True)):
        for output in (output for node in nodes for output in node.get_outputs()):
            layout = getattr(output.node, "layout", None)
            name = layout.view.get_name() if isinstance(layout, ir.NonOwningLayout) else output.get_name()
            if isinstance(V.graph.try_get_buffer(name), ir.ConcatKernel):
                places[name].add(None if skip else index)
    return any(len(found) > 1 for found in places.values())
