"""``TORCH_LOGS="pygraph"`` and ``"+pygraph"``: the coverage facts as they happen.

torch reads ``TORCH_LOGS`` once, while it is being imported, and raises on a name that it does not know.
:func:`understood` goes around the first import of torch: it holds the name back, lets torch import, registers it and
has torch read the variable again. Where torch was imported first, the name was registered by the entry point of the
installed package (:func:`register`, since torch 2.12); ``TORCH_LOGS="+pygraph_trees"``, the name of the package,
works everywhere.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_VARIABLE = "TORCH_LOGS"
_NAME = "pygraph"


def register() -> None:
    """Makes torch know the log ``pygraph``, which is the logger ``pygraph_trees``."""
    from torch._logging import _internal

    if not _internal.log_registry.is_log(_NAME):
        _internal.register_log(_NAME, "pygraph_trees")


@contextmanager
def understood() -> Iterator[None]:
    """Around ``import torch``: the name in ``TORCH_LOGS`` takes effect."""
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
