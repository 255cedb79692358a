"""Chooses which functions run as CUDA graphs.

:func:`leaving_graphs_out` acts before a program is compiled, :func:`why_not_graphed` before any of a compiled graph is
graphed. With "auto", :func:`trial_of` gives each function the :class:`~.trial.Trial` that decides (README.md).
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any
from weakref import WeakValueDictionary

from torch._guards import TracingContext
from torch._inductor import config, cudagraph_utils

from pygraph_trees.compat import graph_policy
from pygraph_trees.reasons import Reason, Why
from pygraph_trees.report.log import FunctionLog
from pygraph_trees.report.naming import BACKWARD, INFERENCE
from pygraph_trees.settings import NATIVE, Settings, allocator_backend, may_wait_for_others

from .profiles import Kept
from .trial import Trial

# From a program to its newest trial. No lock: a finalizer may come under it and wait for a backward in another thread,
# which is compiled there and comes here.
_trials: WeakValueDictionary[str, Trial] = WeakValueDictionary()
_OVERRIDE = "cudagraph_annotation"  # in the `meta` of a program that calls `override_cudagraphs`, since torch 2.12
_UNPLACED = {"triton.pygraph_placement": "off"}


class _Compiling(threading.local):
    """The program that this thread compiles."""

    without_graphs = False  # although it asks for them
    override: Any = None  # what it asks for with ``override_cudagraphs``: ``fwd`` and ``bwd``


_compiling = _Compiling()


def leaving_graphs_out(upstream: Callable[..., Any]) -> Callable[..., Any]:
    """``compile_fx``, which compiles without CUDA graphs if the flags say "never".

    Graphs that the program's own policy wraps, or for which it overrides CUDA graphs to be off, are compiled without
    placement: nothing is staged for recordings that are not ours.
    """
    signature = inspect.signature(upstream)

    @functools.wraps(upstream)
    def compile_fx(*args: Any, **kwargs: Any) -> Any:
        call = signature.bind(*args, **kwargs)
        call.apply_defaults()
        given, meta = call.arguments["config_patches"] or {}, getattr(call.arguments["model_"], "meta", {})
        override = meta.get(_OVERRIDE)
        # Since torch 2.15, other names may be options of a device, which are not in this configuration.
        patch = {name: value for name, value in given.items() if name.startswith("triton.")}
        with config.patch(patch), _noting(override=override):
            is_asked, settings = are_graphs_asked_for(), Settings.current()
        if not is_asked or why_not_graphed(settings) is None:
            if is_asked and settings.placement != "off" and has_own_policy():
                given = {**given, **_UNPLACED}
            call.arguments["config_patches"] = given or call.arguments["config_patches"]
            # A backward is compiled later than its forward. With options, `compile_fx` calls itself.
            if override is not None and _compiling.override is not override:
                call.arguments["inner_compile"] = _unplaced_without_graphs(call.arguments["inner_compile"], override)
            with _noting(override=override):
                return upstream(*call.args, **call.kwargs)
        # The result is that of torch.compile without CUDA graphs, in the same caches. Partitions, and moves of
        # constructors and numbers to the GPU, would change output devices and the places where the program waits.
        call.arguments["config_patches"] = {**given, "triton.cudagraphs": False}
        # A backward is compiled later than its forward.
        call.arguments["inner_compile"] = _noting(without_graphs=True)(call.arguments["inner_compile"])
        meta.pop(_OVERRIDE, None)  # it would turn them on again, and is part of the caches' keys
        try:
            with _noting(without_graphs=True):
                return upstream(*call.args, **call.kwargs)
        finally:
            if override is not None:
                meta[_OVERRIDE] = override

    return compile_fx


@contextlib.contextmanager
def _noting(**facts: Any) -> Iterator[None]:
    """Notes facts about the program that this thread compiles inside."""
    before = {name: getattr(_compiling, name) for name in facts}
    vars(_compiling).update(facts)
    try:
        yield
    finally:
        vars(_compiling).update(before)


def _unplaced_without_graphs(upstream: Callable[..., Any], override: Any) -> Callable[..., Any]:
    @functools.wraps(upstream)
    def inner_compile(*args: Any, **kwargs: Any) -> Any:
        placement = contextlib.nullcontext() if kwargs.get("cudagraphs") else config.patch(_UNPLACED)
        with placement, _noting(override=override):
            return upstream(*args, **kwargs)

    return inner_compile


def are_graphs_asked_for() -> bool:
    """Whether the program that is being compiled asks for CUDA graphs: by configuration, or overriding that."""
    override = _compiling.override
    return bool(config.triton.cudagraphs if override is None or override.fwd is None else override.fwd)


def why_overridden(*, is_backward: bool) -> Why | None:
    """Says that the program turned off the CUDA graphs of the graph that is being installed; None if it did not."""
    override = _compiling.override
    if override is None or not (config.triton.cudagraphs or override.fwd):
        return None
    return Reason.OVERRIDDEN() if override.fwd is False or (is_backward and override.bwd is False) else None


def has_own_policy() -> bool:
    """Whether the program has a policy that makes CUDA graphs in its own way, not as torch does."""
    if (policy := graph_policy(config)) is None:
        return False
    upstream = cudagraph_utils.CUDAGraphPolicy
    names = ("cudagraphify", "wrap_output")
    return any(getattr(getattr(policy, name), "__func__", None) is not getattr(upstream, name) for name in names)


def are_graphs_left_out() -> bool:
    """Whether the graph being installed belongs to a program that asks for CUDA graphs and gets none."""
    return _compiling.without_graphs


def why_not_graphed(settings: Settings) -> Why | None:
    """Says why the settings, or torch's allocator, keep a function out of CUDA graphs; None if they do not."""
    if settings.selective == "never":
        return Reason.NEVER()
    backend = allocator_backend()
    return None if backend == NATIVE else Reason.ALLOCATOR(backend=backend)


def trial_of(log: FunctionLog, settings: Settings, device: int, *, has_fast_path: bool) -> Trial | None:
    """A function's trial, which lives as long as anything refers to it; None if it is not chosen by measurement."""
    # Ranks could decide differently, and would then record those functions again that follow, with collectives perhaps.
    if settings.selective != "auto" or log.has_collective or may_wait_for_others():
        return None
    # In training, all partitions of a forward and its backward share a trial (README.md); a backward is compiled later.
    graph, program = log.graph, None if log.mode == INFERENCE else _program(log.compile_id)
    known = None if program is None else _trials.get(program)
    if known is not None and graph is not None and known.graph is graph:
        return known
    if known is not None and log.mode == BACKWARD and (known.backward is None or known.backward is graph):
        known.backward = graph
        return known
    memory = None
    if graph is not None and graph.code is not None:  # the key of the generated code is known
        partition = log.partition if log.mode == INFERENCE else "all"
        matters = {**asdict(settings), "fast path": has_fast_path, "partition": partition}
        memory = Kept(graph.code, log.name, device, matters)
    trial = Trial(memory=memory, graph=graph)
    if program is not None:
        _trials[program] = trial
    return trial


def _program(compile_id: str | None) -> str | None:
    """Names what a forward and its backward, and no other graphs of the process, have in common."""
    # AOTAutograd numbers what it compiles. A compile id does not suffice: several programs share it if DDP has its
    # buckets compiled separately, and it restarts after `torch._dynamo.reset()`. A graph from AOTAutograd's cache has
    # no number; its backward comes right after its forward.
    context = TracingContext.try_get()
    name = None if context is None else context.aot_graph_name  # one graph's name: ["4_backward"]
    return f"AOT {name[0].rpartition('_')[0]}" if name else compile_id
