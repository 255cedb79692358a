"""Chooses which functions run as CUDA graphs.

:func:`without_graphs` runs before a program is compiled, and :func:`why_not_graphed` once per compiled graph, before
any of it is graphed. With "auto", :func:`trial_of` gives each function the :class:`~.trial.Trial` that decides.
README.md explains the cost model, the trials and the profiles on disk.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from torch._guards import TracingContext

from pygraph_trees.report.naming import BACKWARD, INFERENCE
from pygraph_trees.settings import Settings

from .profiles import Kept
from .trial import Trial

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from pygraph_trees.report.log import FunctionLog

_trials: WeakValueDictionary[str, Trial] = WeakValueDictionary()  # from a program to its newest trial
_lock = threading.RLock()  # a collection under it may run a finalizer that comes here


class _Compiling(threading.local):
    without_graphs = False  # although the program asks for them


_compiling = _Compiling()


def leaving_graphs_out(upstream: Callable[..., Any]) -> Callable[..., Any]:
    """``compile_fx``, which compiles without CUDA graphs if the flags say "never"."""
    from torch._inductor import config

    signature = inspect.signature(upstream)

    @functools.wraps(upstream)
    def compile_fx(*args: Any, **kwargs: Any) -> Any:
        call = signature.bind(*args, **kwargs)
        call.apply_defaults()
        given = call.arguments["config_patches"] or {}
        # Since torch 2.15, other names may be options of a device, which are not in this configuration.
        with config.patch({name: value for name, value in given.items() if name.startswith("triton.")}):
            patches = without_graphs(Settings.current(), given) if config.triton.cudagraphs else None
        if patches is None:
            return upstream(*args, **kwargs)
        call.arguments["config_patches"] = patches
        call.arguments["inner_compile"] = always_without_graphs(call.arguments["inner_compile"])
        with compiling_without_graphs():
            return upstream(*call.args, **call.kwargs)

    return compile_fx


def without_graphs(settings: Settings, patches: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Inductor config patches for a program that asks for CUDA graphs and gets none.

    The result of compilation is then that of ``torch.compile`` without CUDA graphs, in the same caches. Partitions, and
    moves of constructors and numbers to the GPU, would change output devices and the places where the program waits.

    Args:
        settings: the settings under these patches.
        patches: the program's config patches that ask for CUDA graphs; None if the configuration asks for them.
    """
    return None if why_not_graphed(settings) is None else {**(patches or {}), "triton.cudagraphs": False}


@contextlib.contextmanager
def compiling_without_graphs() -> Iterator[None]:
    """Marks, for this thread, all that compiles such a program or installs the result."""
    before, _compiling.without_graphs = _compiling.without_graphs, True
    try:
        yield
    finally:
        _compiling.without_graphs = before


def always_without_graphs(compile_graph: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps the compiler of one graph of such a program: a backward is compiled later than its forward."""

    @functools.wraps(compile_graph)
    def compile_without_graphs(*args: Any, **kwargs: Any) -> Any:
        with compiling_without_graphs():
            return compile_graph(*args, **kwargs)

    return compile_without_graphs


def are_graphs_left_out() -> bool:
    """Whether the graph being installed belongs to a program that asks for CUDA graphs and gets none."""
    return _compiling.without_graphs


def why_not_graphed(settings: Settings) -> str | None:
    """Says why the settings keep a function out of CUDA graphs; None if they do not."""
    return "pygraph_selective is 'never'" if settings.selective == "never" else None


def trial_of(log: FunctionLog, settings: Settings, device: int, *, has_fast_path: bool) -> Trial | None:
    """The trial of a function; None if it is not chosen by measurement.

    A function that calls a collective has no trial, because ranks could decide differently.

    Each partition of an inference graph has its own trial. In training, where a forward gives its backward outputs
    in the graph pool, all partitions of both share one; a backward is compiled later. A trial lives as long as anything
    refers to it.
    """
    if settings.selective != "auto" or log.has_collective:
        return None
    graph = log.graph

    def make() -> Trial:
        memory = _memory(log, settings, device, has_fast_path)
        return Trial(memory=memory, graph=graph, has_fast_path=has_fast_path)

    if log.mode == INFERENCE:
        return make()
    program = _program(log.compile_id)
    with _lock:
        known = None if program is None else _trials.get(program)
        if known is not None:
            if graph is not None and known.graph is graph:
                return known
            if log.mode == BACKWARD and (known.backward is None or known.backward is graph):
                known.backward = graph
                return known
        trial = make()
        if program is not None:
            _trials[program] = trial
        return trial


def _program(compile_id: str | None) -> str | None:
    """Names what a forward and its backward, and no other graphs of the process, have in common.

    AOTAutograd numbers what it compiles. A compile id does not suffice: several programs share it if DDP has its
    buckets compiled separately, and it restarts after ``torch._dynamo.reset()``. A graph from AOTAutograd's cache has
    no number; its backward comes right after its forward.
    """
    context = TracingContext.try_get()
    name = None if context is None else context.aot_graph_name  # one graph's name: ["4_backward"]
    return f"AOT {name[0].rpartition('_')[0]}" if name else compile_id


def _memory(log: FunctionLog, settings: Settings, device: int, has_fast_path: bool) -> Kept | None:
    """The place on disk of a trial's decision; None if the key of the generated code is not known."""
    code = None if log.graph is None else log.graph.code
    if code is None:
        return None
    matters = {
        "indirection": settings.indirection,
        "placement": settings.placement,
        "outputs": settings.outputs,
        "fast path": "yes" if has_fast_path else "no",
        "partition": str(log.partition) if log.mode == INFERENCE else "all",
    }
    return Kept(code, log.name, device, matters)
