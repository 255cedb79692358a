"""CUDA graphs for ``torch.compile(mode="reduce-overhead")``, as a drop-in for torch's CUDA graph trees.

``import pygraph_trees`` patches torch as soon as its compiler is imported (see ``inductor_patches``); programs need no
change. :func:`report` tells what happened to every compiled function and why. With ``PYGRAPH_DISABLE=1`` torch is not
patched. An invalid environment variable is ignored with a warning. The import needs no torch and takes milliseconds.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import inductor_patches
from inductor_patches import environment, install, uninstall

from . import report as _package  # noqa: F401  before the function of that name
from .settings import FLAGS
from .version import __version__

if TYPE_CHECKING:
    from .benchmark.outcome import Outcome
    from .benchmark.program import Program
    from .cli.explanation import Explanation
    from .report.summary import Report
    from .serving.prepare import Prepared

if not environment.disabled():
    environment.check((flag.environment, flag.values, flag.default) for flag in FLAGS)
if not environment.builds():
    from .native import build

    build.prevent()
inductor_patches.install_when_loaded()


def report() -> Report:
    """The report on every graph and function that this process has compiled for CUDA graphs so far."""
    from .native import build
    from .native.location import torch_version
    from .report import summary
    from .report.records import FeatureState, HostWork

    states = inductor_patches.status()
    features = (FeatureState(found.feature, found.state, "; ".join(found.mismatches) or None) for found in states)
    counts = {
        "backwards": ("backward_edges", "counts"),
        "forwards": ("host_work", "forwards"),
        "arguments": ("host_work", "arguments"),
        "calls": ("direct_calls", "counts"),
    }
    hooks = {field: sys.modules.get(f"pygraph_trees.trees.hooks.{hook}") for field, (hook, _) in counts.items()}
    # They are there once the patches are applied.
    host_work = {f: HostWork(*getattr(hook, counts[f][1])()) for f, hook in hooks.items() if hook is not None}
    native = inductor_patches.why_unsupported(torch_version()) or build.status()
    return summary.report(tuple(features), native, host_work)


def verify(fn: Callable[..., Any], *args: Any, calls: int = 5, **kwargs: Any) -> None:
    """Compares a function compiled with CUDA graphs, and arguments at new addresses at each call, with one without.

    Calls :func:`pygraph_trees.benchmark.verify.verify`. Raises if an output or a mutated argument differs in any bit,
    and also if nothing was compared: without a GPU, or if no part of the function runs in a CUDA graph.
    """
    from pygraph_trees.benchmark.verify import verify as compare

    compare(fn, *args, calls=calls, **kwargs)


def prepare(fn: Callable[..., Any], sizes: Iterable[Any], *, most_calls: int = 1000) -> Prepared:
    """Calls a compiled program with all its sizes before traffic, until nothing is recorded or tried any more.

    Later calls with these sizes compile, try and build nothing. They record only if an output begins to outlive its
    step, at most three times a function. All sizes get graphs at once, up to 128 of a graph with dynamic shapes.

    Args:
        fn: a compiled function or module, or a function that makes a whole step: forward, backward and optimizer. It
            really runs, with the caller's grad mode.
        sizes: for each size a tuple of positional arguments, a dictionary of keyword arguments, or one other argument;
            or a callable that makes them for each call. If the inputs of traffic are new tensors, so should these be.
        most_calls: of each size.

    Returns:
        An object that prints as a table: for each size calls, replays and recordings, bytes of the graph pool, of own
        memory of outputs, and of the GPU outside of torch's allocator (executable graphs and loaded kernels; other
        processes count too), and why functions run un-graphed. Its ``settled`` is false if a size still changed at the
        limit. It has ``to_json()`` and ``to_html(path)``.
    """
    from .serving.prepare import prepare as prepared

    return prepared(fn, sizes, most_calls=most_calls)


def explain(fn: Callable[..., Any], *args: Any, arch: str | None = None, **kwargs: Any) -> Explanation:
    """Explains how a module or function would run with CUDA graphs; needs no GPU and runs nothing.

    Args:
        args: arguments of ``fn``, as are ``kwargs``. A tensor on ``meta`` stands for one on the GPU; parameters of
            ``fn`` count as on the GPU. A module in training mode is explained with its backward.
        arch: the GPU or its architecture, ``h100`` or ``sm_90``; by default that of the current one, or ``sm_90``.

    Returns:
        An object that prints as text, with ``to_json()`` and ``to_html(path)``.
    """
    import torch

    from .cli.explain import explain as explained

    if arch is None:
        is_there = torch.cuda.is_available()
        arch = "sm_{}{}".format(*torch.cuda.get_device_capability()) if is_there else "sm_90"
    return explained(_program(fn, args, kwargs), arch)


def compare(fn: Callable[..., Any], *args: Any, rounds: int = 5, **kwargs: Any) -> Outcome:
    """Measures a module or function on the GPU: eager, ``torch.compile``, upstream's CUDA graphs, and these.

    Args:
        args: arguments of ``fn``, as are ``kwargs``. A module in training mode is trained: forward, loss and backward.
        rounds: in which all ways take turns.

    Returns:
        An object that prints as tables with a verdict, with ``to_json()`` and ``to_html(path)``.

    Raises:
        NeedsGpu: torch can use no GPU.
    """
    import torch

    from .benchmark import Effort
    from .benchmark import compare as measured
    from .benchmark.outcome import NeedsGpu, Outcome

    if not torch.cuda.is_available():
        raise NeedsGpu(instead="explain needs none")
    return Outcome(tuple(measured(_program(fn, args, kwargs), effort=Effort(rounds=rounds))), report())


def name_kernels(trace: str | os.PathLike[str]) -> tuple[int, int]:
    """Names kernels of replayed graphs in a trace: :func:`pygraph_trees.benchmark.kernels.name_kernels`."""
    from .benchmark.kernels import name_kernels as named

    return named(trace)


def _program(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Program:
    from .cli.target import program_of

    if (program := program_of((fn, args, kwargs), getattr(fn, "__name__", type(fn).__name__))) is None:
        raise TypeError(f"expected a module or a function, got {type(fn).__name__}")
    return program


if not TYPE_CHECKING:  # or it would have every attribute for type checkers

    def __getattr__(name: str) -> Any:
        if name == "Report":
            from .report.summary import Report

            return Report
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "Report",
    "__version__",
    "compare",
    "explain",
    "install",
    "name_kernels",
    "prepare",
    "report",
    "uninstall",
    "verify",
]
