"""Patches of ``torch._dynamo.utils``: the two profiler marks around the code that gathers a compiled function's inputs.

Each call of a compiled function makes them, also if no profiler runs. The replacements then do nothing. Torch 2.15 no
longer wraps the marks in ``torch._dynamo.disable``, so they stay upstream's there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .patch import Patch, Rebind

_MODULE = "torch._dynamo.utils"


def _enter(upstream: Callable[..., Any]) -> Callable[..., Any]:
    from pygraph_trees.trees import call_marks

    return call_marks.enter(upstream)


def _exit(upstream: Callable[..., Any]) -> Callable[..., Any]:
    from pygraph_trees.trees import call_marks

    return call_marks.exit(upstream)


PATCHES: tuple[Patch, ...] = (
    Rebind(
        feature="calls",
        module=_MODULE,
        name="record_pregraph_bytecode_enter",
        replace=_enter,
        removable="torch 2.15 does without the wrapper",
    ),
    Rebind(
        feature="calls",
        module=_MODULE,
        name="record_pregraph_bytecode_exit",
        replace=_exit,
        removable="torch 2.15 does without the wrapper",
    ),
)
