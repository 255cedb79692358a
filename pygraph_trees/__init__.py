"""CUDA graphs for ``torch.compile(mode="reduce-overhead")``, as a drop-in for torch's own trees.

``import pygraph_trees`` is all: it patches the torch that is installed (``inductor_patches`` says what and how), and
compiled programs stay as they are. :func:`report` tells what became of every compiled function and why.

``PYGRAPH_DISABLE=1`` in the environment leaves torch alone. A wrong value there, or in a flag's variable, is ignored
with a warning; it does not stop the import.
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
    """Compares a function under CUDA graphs, its arguments at new addresses each call, with itself compiled without.

    See :func:`pygraph_trees.benchmark.verify.verify`, which it calls. Raises if an output or a written argument
    differs in any bit, and also if nothing was compared: without a GPU, or if no part of it runs in a CUDA graph.
    """
    from pygraph_trees.benchmark.verify import verify as compare

    compare(fn, *args, calls=calls, **kwargs)


__all__ = ["Report", "__version__", "report", "verify"]
