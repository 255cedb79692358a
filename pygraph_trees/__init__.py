"""CUDA graphs for ``torch.compile(mode="reduce-overhead")``, as a drop-in for torch's own trees.

``import pygraph_trees`` is all: it patches the torch that is installed (``inductor_patches`` says what and how), and
compiled programs stay as they are. :func:`report` tells what became of every compiled function and why.

``PYGRAPH_DISABLE=1`` in the environment leaves torch alone.
"""

from __future__ import annotations

import inductor_patches
from inductor_patches.torch_logs import understood

with understood():
    import torch  # noqa: F401

from .coverage.report import Report, report
from .version import __version__

inductor_patches.install()

__all__ = ["Report", "__version__", "report"]
