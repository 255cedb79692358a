"""Replaces the two profiler marks that Dynamo puts around the code that gathers a compiled function's inputs.

Every call of a compiled function makes these marks, even if no profiler runs. :func:`enter` and :func:`exit` take
upstream's function and return one that does nothing unless a profiler runs. If Dynamo no longer wraps the marks,
upstream's function is returned.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import profiler

from pygraph_trees.compat import are_call_marks_wrapped


def enter(upstream: Callable[..., Any]) -> Callable[..., Any]:
    def record_pregraph_bytecode_enter() -> Any:
        return upstream() if profiler._is_profiler_enabled else None

    return _uncompiled(upstream, record_pregraph_bytecode_enter)


def exit(upstream: Callable[..., Any]) -> Callable[..., Any]:
    def record_pregraph_bytecode_exit(mark: Any) -> None:
        if mark is not None:
            upstream(mark)

    return _uncompiled(upstream, record_pregraph_bytecode_exit)


def _uncompiled(upstream: Callable[..., Any], function: Callable[..., Any]) -> Callable[..., Any]:
    """Marks ``function`` so that Dynamo does not compile it; returns ``upstream`` if Dynamo does not wrap it."""
    if not are_call_marks_wrapped():
        return upstream
    function.__wrapped__ = upstream  # type: ignore[attr-defined]
    frames = torch._C._dynamo.eval_frame
    skip = frames._FrameAction.SKIP
    frames.set_code_exec_strategy(function.__code__, frames._FrameExecStrategy(skip, skip))
    return function
