"""CUDA graphs for ``torch.compile(mode="reduce-overhead")``, as a drop-in for torch's CUDA graph trees.

``import pygraph_trees`` patches the installed torch (see ``inductor_patches``); programs need no change.
:func:`report` tells what happened to every compiled function and why. With ``PYGRAPH_DISABLE=1`` torch is not patched.
An invalid value of an environment variable is ignored with a warning, and does not stop the import.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import inductor_patches
from inductor_patches.environment import builds
from inductor_patches.torch_logs import understood

with understood():
    import torch  # noqa: F401

from .native import build
from .report.records import FeatureState
from .report.summary import Report, report, tell_state
from .version import __version__


def _features() -> Iterator[FeatureState]:
    for found in inductor_patches.status():
        yield FeatureState(found.feature, found.state, "; ".join(found.mismatches) or None)


tell_state(_features, build.status)
if not builds():
    build.prevent()
inductor_patches.install()


def verify(fn: Callable[..., Any], *args: Any, calls: int = 5, **kwargs: Any) -> None:
    """Compares a function compiled with CUDA graphs, and arguments at new addresses at each call, with one without.

    Calls :func:`pygraph_trees.benchmark.verify.verify`. Raises if an output or a mutated argument differs in any bit,
    and also if nothing was compared: without a GPU, or if no part of the function runs in a CUDA graph.
    """
    from pygraph_trees.benchmark.verify import verify as compare

    compare(fn, *args, calls=calls, **kwargs)


__all__ = ["Report", "__version__", "report", "verify"]
