"""Patches of ``torch._dynamo.utils``: the two profiler marks around the code that gathers a compiled function's inputs.

Each call of a compiled function makes these marks, even if no profiler runs; the replacements then do nothing. Torch
2.15 no longer wraps the marks in ``torch._dynamo.disable``, so they stay upstream's there.
"""

from __future__ import annotations

from .patch import Patch, Rebind, made_by

_MODULE = "torch._dynamo.utils"


PATCHES: tuple[Patch, ...] = (
    Rebind(
        feature="calls",
        module=_MODULE,
        name="record_pregraph_bytecode_enter",
        replace=made_by("pygraph_trees.trees.call_marks", "enter"),
        removable="torch 2.15 does without the wrapper",
    ),
    Rebind(
        feature="calls",
        module=_MODULE,
        name="record_pregraph_bytecode_exit",
        replace=made_by("pygraph_trees.trees.call_marks", "exit"),
        removable="torch 2.15 does without the wrapper",
    ),
)
