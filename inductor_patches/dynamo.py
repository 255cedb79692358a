"""Patches of ``torch._dynamo.utils``: the two marks around the code that gathers a compiled function's inputs.

Each call of a compiled function makes them, for the profiler, and up to torch 2.14 each goes through the wrapper of
``torch._dynamo.disable``. Here they are left out while nobody profiles: on a CPU, with torch 2.11, a call of a function
with 198 parameters takes 22 µs instead of 24 before its graph is called.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .patch import Patch, Rebind

_MODULE = "torch._dynamo.utils"


def _enter(upstream: Callable[..., Any]) -> Callable[..., Any]:
    from torch.autograd import profiler

    def record_pregraph_bytecode_enter() -> Any:
        return upstream() if profiler._is_profiler_enabled else None

    return _unseen(upstream, record_pregraph_bytecode_enter)


def _exit(upstream: Callable[..., Any]) -> Callable[..., Any]:
    def record_pregraph_bytecode_exit(mark: Any) -> None:
        if mark is not None:
            upstream(mark)

    return _unseen(upstream, record_pregraph_bytecode_exit)


def _unseen(upstream: Callable[..., Any], function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` such that Dynamo does not compile it; upstream's where that needs no wrapper either (since 2.15)."""
    import torch

    if not hasattr(upstream, "__wrapped__"):
        return upstream
    function.__wrapped__ = upstream  # type: ignore[attr-defined]
    frames = torch._C._dynamo.eval_frame
    skip = frames._FrameAction.SKIP
    frames.set_code_exec_strategy(function.__code__, frames._FrameExecStrategy(skip, skip))
    return function


PATCHES: tuple[Patch, ...] = tuple(
    Rebind(
        feature="calls",
        module=_MODULE,
        name=name,
        replace=replace,
        removable="torch 2.15 does without the wrapper",
    )
    for name, parameters, uses, replace in (
        ("record_pregraph_bytecode_enter", (), ("_is_profiler_enabled",), _enter),
        ("record_pregraph_bytecode_exit", ("cm",), ("__exit__",), _exit),
    )
)
