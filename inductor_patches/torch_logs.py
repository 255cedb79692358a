"""``TORCH_LOGS="pygraph"`` and ``"+pygraph"``: the facts of the report as they happen.

Torch reads ``TORCH_LOGS`` once, during its import, and raises on an unknown name. :func:`understood`, around the first
import of torch, hides the name, registers it after the import, and lets torch read the variable again. If torch was
imported earlier, the installed package's entry point has registered the name (:func:`register`, since torch 2.12).
``TORCH_LOGS="+pygraph_trees"`` always works.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_VARIABLE = "TORCH_LOGS"
_NAME = "pygraph"


def register() -> None:
    """Registers the log ``pygraph`` with torch; it is the logger ``pygraph_trees``."""
    from torch._logging import _internal

    if not _internal.log_registry.is_log(_NAME):
        _internal.register_log(_NAME, "pygraph_trees")


@contextmanager
def understood() -> Iterator[None]:
    """Goes around ``import torch``, so that the name in ``TORCH_LOGS`` takes effect."""
    wanted = os.environ.get(_VARIABLE, "")
    names = [name.strip() for name in wanted.split(",")]
    others = [name for name in names if name.lstrip("+-") != _NAME]
    held_back = "torch" not in sys.modules and others != names
    if held_back:
        del os.environ[_VARIABLE]
        if others:
            os.environ[_VARIABLE] = ",".join(others)
    try:
        yield
    finally:
        if held_back:
            os.environ[_VARIABLE] = wanted
    register()
    if held_back:
        from torch._logging import _internal

        _internal._init_logs()
