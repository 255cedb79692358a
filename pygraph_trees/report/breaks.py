"""Graph breaks: what Dynamo did not trace, where the program does it, and what helps.

:func:`noting` wraps the method in which Dynamo logs a break. Breaks are kept in :data:`noted`, by kind, text and line
of the program, and :func:`records` explains them. One that cannot be noted is logged, and compilation continues.
"""

from __future__ import annotations

import functools
import logging
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from .naming import source_line
from .records import GraphBreak

_log = logging.getLogger("pygraph_trees.report")
_TORCH = f"{Path(torch.__file__).parent}/"
noted: Counter[tuple[str, str, str | None]] = Counter()  # by Dynamo's kind and description of a break, and its line

_KEEP = "keep the value in a tensor, or read it after the compiled function"
_OUTSIDE = "call it before or after the compiled function"
# By Dynamo's kind of a break, the same in torch 2.11 to 2.15; for other kinds, Dynamo's first hint is shown.
_ADVICE = {
    "Attempted to call function marked as skipped": f"{_OUTSIDE}, or make it a custom operator",
    "Data-dependent branching": "compute both branches and choose with torch.where, or use torch.cond",
    "Data dependent operator": _KEEP,
    "Dynamic shape operator": "use an operator whose output size does not depend on data, such as torch.where",
    "Failed to trace builtin operator": _OUTSIDE,
    "Unsupported Tensor.item() call with capture_scalar_outputs=False": _KEEP,
}
_PRINT = "print after the compiled function, or add print to torch._dynamo.config.reorderable_logging_functions"


def noting(upstream: Callable[..., Any]) -> Callable[..., Any]:
    """``InstructionTranslatorBase.log_graph_break``, which also notes the break."""

    @functools.wraps(upstream)
    def log_graph_break(self: Any, code_options: Any, reason: str, exc: Any) -> Any:
        try:
            if not exc.logged:  # torch logs it in the frames that the failing one was inlined into, too
                begin = traceback.FrameSummary(*map(code_options.get, ("co_filename", "co_firstlineno", "co_name")))
                stack = getattr(exc, "real_stack", None) or [begin]
                own = [frame for frame in stack if not frame.filename.startswith(_TORCH)] or stack
                line = source_line("".join(traceback.format_list(own[-1:])))
                noted[getattr(exc, "gb_type", ""), getattr(exc, "msg", str(exc)), line] += 1
        except Exception:
            _log.warning("a graph break could not be noted", exc_info=True)
        return upstream(self, code_options, reason=reason, exc=exc)

    return log_graph_break


def records() -> tuple[GraphBreak, ...]:
    """All breaks so far, in the order of their first occurrence."""
    return tuple(_record(*found, count) for found, count in dict(noted).items())


def _record(kind: str, text: str, line: str | None, count: int) -> GraphBreak:
    # A break while another one is handled is appended; the first one is the cause.
    lines = [line.strip() for line in text.splitlines() if line.strip()] or [kind]
    why = next((line.removeprefix("Explanation: ") for line in lines if line.startswith("Explanation: ")), None)
    others = [i for i, line in enumerate(lines) if line.startswith("Explanation: ")][1:]
    own = lines[: others[0]] if others else lines
    hint = next((line.removeprefix("Hint: ") for line in own if line.startswith("Hint: ")), None)
    # An error of the compiler came where the graph ended; its text has the line of the operation.
    of_operation = source_line(text.partition("Original traceback:")[2].partition("\n\n")[0])
    advice = _PRINT if "operator `print`" in (why or "") else _ADVICE.get(lines[0], hint)
    if kind == "graph break in loop":
        parts = (advice or "").rstrip("."), "since it is in a loop, none of its function is compiled"
        advice = "; ".join(filter(None, parts))
    return GraphBreak(lines[0] if why is None else f"{lines[0]}: {why}", of_operation or line, count, advice)
