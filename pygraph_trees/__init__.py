"""CUDA graphs for ``torch.compile(mode="reduce-overhead")``, as a drop-in for torch's CUDA graph trees.

``import pygraph_trees`` patches torch as soon as its compiler is imported (see ``inductor_patches``); programs need no
change. :func:`report` tells what happened to every compiled function and why. With ``PYGRAPH_DISABLE=1`` torch is not
patched. An invalid environment variable is ignored with a warning. The import needs no torch and takes milliseconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import inductor_patches
from inductor_patches import environment

from . import report as _package  # noqa: F401  before the function of that name
from .settings import FLAGS
from .version import __version__

if TYPE_CHECKING:
    from .report.records import FeatureState
    from .report.summary import Report

if not environment.disabled():
    environment.check((flag.environment, flag.values, flag.default) for flag in FLAGS)
if not environment.builds():
    from .native import build

    build.prevent()
inductor_patches.install_when_loaded()


def report() -> Report:
    """The report on every graph and function that this process has compiled for CUDA graphs so far."""
    from .native import build
    from .report import summary

    summary.tell_state(_features, build.status)
    return summary.report()


def _features() -> Iterator[FeatureState]:
    from .report.records import FeatureState

    for found in inductor_patches.status():
        yield FeatureState(found.feature, found.state, "; ".join(found.mismatches) or None)


def verify(fn: Callable[..., Any], *args: Any, calls: int = 5, **kwargs: Any) -> None:
    """Compares a function compiled with CUDA graphs, and arguments at new addresses at each call, with one without.

    Calls :func:`pygraph_trees.benchmark.verify.verify`. Raises if an output or a mutated argument differs in any bit,
    and also if nothing was compared: without a GPU, or if no part of the function runs in a CUDA graph.
    """
    from pygraph_trees.benchmark.verify import verify as compare

    compare(fn, *args, calls=calls, **kwargs)


def __getattr__(name: str) -> Any:
    if name == "Report":
        from .report.summary import Report

        return Report
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = ["Report", "__version__", "report", "verify"]
