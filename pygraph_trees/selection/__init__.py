"""Which functions are graphed.

:func:`why_not_graphed` is asked once for each compiled graph, before any of it is graphed; where functions are chosen
by measurement, :func:`trial_of` gives each the :class:`~.trial.Trial` that decides.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from torch._guards import TracingContext

from pygraph_trees.coverage.naming import BACKWARD

from .decision import Objective
from .profiles import Kept
from .trial import Trial

if TYPE_CHECKING:
    from pygraph_trees.coverage.log import FunctionLog
    from pygraph_trees.settings import Settings

_trials: WeakValueDictionary[str, Trial] = WeakValueDictionary()  # the newest one of a program
_lock = threading.Lock()


def why_not_graphed(settings: Settings) -> str | None:
    """The reason why the settings keep a graph un-graphed, None where they do not."""
    return "pygraph_selective is 'never'" if settings.selective == "never" else None


def trial_of(log: FunctionLog, settings: Settings, device: int) -> Trial | None:
    """The trial of a function of a compiled graph; None where functions are not chosen by measurement.

    Partitions of a graph have one together, and a backward, which is compiled later, has that of its forward. It is
    known as long as somebody holds it.
    """
    if settings.selective != "auto":
        return None
    graph, program = log.graph, _program(log.compile_id)
    with _lock:
        known = None if program is None else _trials.get(program)
        if known is not None:
            if graph is not None and known.graph is graph:
                return known
            if log.mode == BACKWARD and (known.backward is None or known.backward is graph):
                known.backward = graph
                return known
        code = None if graph is None else graph.code
        memory = None if code is None else Kept(code, log.name, device, _what_matters(settings))
        trial = Trial(Objective(settings.objective), memory=memory, graph=graph)
        if program is not None:
            _trials[program] = trial
        return trial


def _program(compile_id: str | None) -> str | None:
    """What a forward and its backward have in common, and no other graphs of the process.

    AOTAutograd counts what it compiles. A compile id is that of several programs where DDP has its buckets compiled
    apart, and begins anew behind ``torch._dynamo.reset()``; but what comes from AOTAutograd's cache has no number, and
    there a backward comes right behind its forward.
    """
    context = TracingContext.try_get()
    name = None if context is None else context.aot_graph_name  # of one graph: ["4_backward"]
    return f"AOT {name[0].rpartition('_')[0]}" if name else compile_id


def _what_matters(settings: Settings) -> dict[str, str]:
    return {"objective": settings.objective, "indirection": settings.indirection, "placement": settings.placement}
