"""Names for readers: of a compiled graph (the program that Dynamo traces, compile id, mode) and of a line of source.

The names of a graph are read from the state of the compiling thread, so these functions must run there, during
compilation; otherwise the id and the program's name are None. No code looks anything up by a name.
"""

from __future__ import annotations

import inspect
import os
import re
from types import CodeType
from typing import Any

import torch

_RESUMED = re.compile(r"torch_dynamo_resume_in_(?P<name>.+)_at_(?P<line>\d+)$")
FRAME = re.compile(r'\s*File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>\S+)')


def compile_id() -> str | None:
    current = torch._guards.CompileContext.current_compile_id()
    return None if current is None else str(current)


BACKWARD, FORWARD, INFERENCE = "backward", "forward", "inference"


def mode_name(*, is_backward: bool, is_inference: bool) -> str:
    return BACKWARD if is_backward else INFERENCE if is_inference else FORWARD


def program_name() -> str | None:
    """The class or function that Dynamo traces, after a graph break with its line (``forward:31``), if any."""
    code, module = _traced()
    if code is None:
        return None
    resumed = _RESUMED.match(code.co_name)
    if module is not None:
        return f"{type(module).__name__}:{resumed['line']}" if resumed else type(module).__name__
    return f"{resumed['name']}:{resumed['line']}" if resumed else str(code.co_name)


def program_line() -> str | None:
    """Where the function that Dynamo traces begins, or continues after a graph break: ``model.py:31 in forward``."""
    code, module = _traced()
    if code is None:
        return None
    if module is not None:
        forward = type(module).forward
        is_torchs = code.co_filename.startswith(os.path.dirname(torch.__file__) + os.sep)
        # Torch calls its own modules in a function around them, and other packages decorate the method.
        if (is_torchs and "fn" in code.co_freevars) or getattr(forward, "__code__", None) is code:
            code = getattr(inspect.unwrap(forward), "__code__", code)
    resumed = _RESUMED.match(code.co_name)
    return _place(code.co_filename, resumed["line"] if resumed else code.co_firstlineno, code.co_name)


def _traced() -> tuple[CodeType | None, Any]:
    """The code that Dynamo traces, if any, and the module whose method it is."""
    from torch._dynamo import symbolic_convert

    if (tracer := getattr(symbolic_convert.tls, "current_tx", None)) is None:
        return None, None
    # Dynamo calls one of torch's own modules through a function that holds it as `fn`.
    owners = (tracer.f_locals.get("self"), tracer.f_locals.get("fn"))
    return tracer.f_code, next((owner for owner in owners if isinstance(owner, torch.nn.Module)), None)


def _place(file: str, line: object, function: str) -> str:
    resumed = _RESUMED.match(function)
    return f"{file}:{line} in {resumed['name'] if resumed else function}"


def source_line(stack_trace: str | None) -> str | None:
    """The innermost frame of a stack trace, as ``file:line in function: code``."""
    lines = (stack_trace or "").splitlines()
    frames = [(i, m) for i, m in enumerate(map(FRAME.match, lines)) if m]
    if not frames:
        return None
    at, frame = frames[-1]
    code = lines[at + 1].strip() if at + 1 < len(lines) else ""
    place = _place(*frame.group("file", "line", "function"))
    return f"{place}: {code}" if code else place
