"""Names of a compiled graph: the program that Dynamo traces, the compile id, and the mode.

The functions read the state of the compiling thread, so they must run there, during compilation; otherwise the id and
the program's name are None. The names are for readers. No code looks anything up by them.
"""

from __future__ import annotations

import re

import torch

_RESUMED = re.compile(r"torch_dynamo_resume_in_(?P<name>.+)_at_(?P<line>\d+)$")


def compile_id() -> str | None:
    """Dynamo's id of the current compilation."""
    current = torch._guards.CompileContext.current_compile_id()
    return None if current is None else str(current)


BACKWARD = "backward"


def mode_name(*, is_backward: bool, is_inference: bool) -> str:
    return BACKWARD if is_backward else "inference" if is_inference else "forward"


def program_name() -> str | None:
    """The class of the module or the name of the function that Dynamo traces; None if it traces nothing.

    After a graph break, Dynamo continues in a function of its own. Its name then has the line: ``forward:31``.
    """
    from torch._dynamo import symbolic_convert

    tracer = getattr(symbolic_convert.tls, "current_tx", None)
    if tracer is None:
        return None
    resumed = _RESUMED.match(tracer.f_code.co_name)
    # Dynamo calls one of torch's own modules through a function that holds it as `fn`.
    for owner in (tracer.f_locals.get("self"), tracer.f_locals.get("fn")):
        if isinstance(owner, torch.nn.Module):
            return f"{type(owner).__name__}:{resumed['line']}" if resumed else type(owner).__name__
    return f"{resumed['name']}:{resumed['line']}" if resumed else str(tracer.f_code.co_name)
