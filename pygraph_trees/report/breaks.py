"""Graph breaks: what Dynamo did not trace, where the program does it, and what helps.

:func:`noting` wraps the method in which Dynamo logs a break, which it calls only while it compiles. A break is noted by
kind, text and line of the program, with how often it occurred; :func:`records` gives them all. Inside :func:`apart`,
breaks are kept from the report. A break that cannot be noted is logged, and compilation continues.
"""

from __future__ import annotations

import functools
import logging
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from .naming import frame_line, source_line
from .records import GraphBreak

_log = logging.getLogger("pygraph_trees.report")
_Noted = tuple[str, str, str | None]  # Dynamo's kind and description of a break, and its line
_noted: Counter[_Noted] = Counter()

_LOOP = "graph break in loop"
_KEEP = "keep the value in a tensor, or read it after the compiled function"
_OUTSIDE = "call it before or after the compiled function"
# By Dynamo's kind of a break, the same in torch 2.11 to 2.15; for other kinds, Dynamo's first hint is shown.
_ADVICE = {
    "Call to `torch._dynamo.graph_break()`": "remove the call",
    "Data-dependent branching": "compute both branches and choose with torch.where, or use torch.cond",
    "Data dependent operator": _KEEP,
    "Dynamic shape operator": "use an operator whose output size does not depend on data, such as torch.where",
    "Failed to trace builtin operator": _OUTSIDE,
    "Skip calling `torch.compiler.disable()`d function": f"remove torch.compiler.disable, or {_OUTSIDE}",
    "Tensor.tolist() with non-integer tensor": _KEEP,
    "Unsupported Tensor.item() call with capture_scalar_outputs=False": _KEEP,
    "Attempted to call function marked as skipped": f"{_OUTSIDE}, or make it a custom operator",
    "logging.Logger method not supported for non-export cases": "log outside of the compiled function, or add the "
    "method to torch._dynamo.config.ignore_logging_functions",
}
_PRINT = "print after the compiled function, or add print to torch._dynamo.config.reorderable_logging_functions"


def noting(upstream: Callable[..., Any]) -> Callable[..., Any]:
    """``InstructionTranslatorBase.log_graph_break``, which also notes the break."""

    @functools.wraps(upstream)
    def log_graph_break(self: Any, code_options: Any, reason: str, exc: Any) -> Any:
        try:
            if not exc.logged:  # torch logs it in the frames that the failing one was inlined into, too
                code = code_options["co_filename"], code_options["co_firstlineno"], code_options["co_name"]
                line = frame_line(getattr(exc, "real_stack", None) or (), code)
                _noted[getattr(exc, "gb_type", None) or "", getattr(exc, "msg", None) or str(exc), line] += 1
        except Exception:
            _log.warning("a graph break could not be noted", exc_info=True)
        return upstream(self, code_options, reason=reason, exc=exc)

    return log_graph_break


def records() -> tuple[GraphBreak, ...]:
    """All breaks so far, or all inside of :func:`apart`, in the order of their first occurrence."""
    return tuple(_record(*noted, count) for noted, count in dict(_noted).items())


def clear() -> None:
    _noted.clear()


@contextmanager
def apart() -> Iterator[None]:
    """Inside, breaks are noted by themselves; afterwards, the earlier ones are there again without them."""
    global _noted
    outer, _noted = _noted, Counter()
    try:
        yield
    finally:
        _noted = outer


def _record(kind: str, text: str, line: str | None, count: int) -> GraphBreak:
    # A break while another one is handled is appended; the first one is the cause.
    lines = [line.strip() for line in text.splitlines() if line.strip()] or [kind]
    why = next((line.removeprefix("Explanation: ") for line in lines if line.startswith("Explanation: ")), None)
    hint = next((line.removeprefix("Hint: ") for line in lines if line.startswith("Hint: ")), None)
    # An error of the compiler came where the graph ended; its text has the line of the operation.
    of_operation = source_line(text.partition("Original traceback:")[2].partition("\n\n")[0])
    is_print = "operator `print`" in (why or "")
    advice = _PRINT if is_print else _ADVICE.get(lines[0], hint)
    if kind == _LOOP:
        advice = f"{advice}; since it is in a loop, none of its function is compiled"
    return GraphBreak(lines[0] if why is None else f"{lines[0]}: {why}", of_operation or line, count, advice)
