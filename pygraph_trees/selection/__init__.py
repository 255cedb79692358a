"""Which functions are graphed.

:func:`why_not_graphed` is asked once for each compiled graph, before any of it is graphed; where functions are chosen
by measurement, :func:`trial_of` gives each the :class:`~.trial.Trial` that decides.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from pygraph_trees.coverage.naming import BACKWARD

from .decision import Objective
from .profiles import Kept
from .trial import Trial

if TYPE_CHECKING:
    from pygraph_trees.coverage.log import FunctionLog
    from pygraph_trees.settings import Settings

_trials: WeakValueDictionary[str, Trial] = WeakValueDictionary()  # the newest one of a compile id
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
    graph, compile_id = log.graph, log.compile_id
    with _lock:
        known = None if compile_id is None else _trials.get(compile_id)
        if known is not None and (log.mode == BACKWARD or (graph is not None and known.graph is graph)):
            return known
        code = None if graph is None else graph.code
        memory = None if code is None else Kept(code, log.name, device, _what_matters(settings))
        trial = Trial(Objective(settings.objective), memory=memory, graph=graph)
        if compile_id is not None:
            _trials[compile_id] = trial
        return trial


def _what_matters(settings: Settings) -> dict[str, str]:
    return {"objective": settings.objective, "indirection": settings.indirection, "placement": settings.placement}
