"""Names for people: of a compiled graph (the program that Dynamo traced, compile id, mode) and of a line of source.

The names of a graph are asked for while it is compiled, in the thread that compiles. Nothing is looked up by a name.
"""

from __future__ import annotations

import re

import torch

_RESUMED = re.compile(r"torch_dynamo_resume_in_(?P<name>.+)_at_(?P<line>\d+)$")
FRAME = re.compile(r'\s*File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>\S+)')


def compile_id() -> str | None:
    """The compile id that Dynamo gave to what is being compiled."""
    current = torch._guards.CompileContext.current_compile_id()
    return None if current is None else str(current)


BACKWARD = "backward"


def mode_name(*, is_backward: bool, is_inference: bool) -> str:
    return BACKWARD if is_backward else "inference" if is_inference else "forward"


def program_name() -> str | None:
    """The class of the module or the name of the function that Dynamo is tracing; None where it traces nothing.

    Behind a graph break, where Dynamo goes on in a function of its own, the line is added: ``forward:31``.
    """
    from torch._dynamo import symbolic_convert

    tracer = getattr(symbolic_convert.tls, "current_tx", None)
    if tracer is None:
        return None
    resumed = _RESUMED.match(tracer.f_code.co_name)
    # A module of torch's own is called through a function that holds it as `fn`.
    for owner in (tracer.f_locals.get("self"), tracer.f_locals.get("fn")):
        if isinstance(owner, torch.nn.Module):
            return f"{type(owner).__name__}:{resumed['line']}" if resumed else type(owner).__name__
    return f"{resumed['name']}:{resumed['line']}" if resumed else str(tracer.f_code.co_name)


def source_line(stack_trace: str | None) -> str | None:
    """The innermost frame of a stack trace, as ``file:line in function: code``."""
    lines = (stack_trace or "").splitlines()
    frames = [(i, m) for i, m in enumerate(map(FRAME.match, lines)) if m]
    if not frames:
        return None
    at, frame = frames[-1]
    code = lines[at + 1].strip() if at + 1 < len(lines) else ""
    place = f"{frame['file']}:{frame['line']} in {frame['function']}"
    return f"{place}: {code}" if code else place
