"""The code that Dynamo made, without its reading of the compiled code's inputs from modules.

Dynamo's code pushes each input, reached from the arguments and globals, and then calls the compiled code. In a direct
call, facts hold all these objects, so C++ gives them at once (``take_inputs``). A function's first direct call notes
the inputs: each must be a tensor of a fact or a variable, or the code stays as it is.
"""

from __future__ import annotations

import dis
import itertools
import logging
import sys
import threading
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any

from torch._dynamo.bytecode_transformation import (
    Instruction,
    create_call_function,
    create_instruction,
    transform_code_object,
)

from pygraph_trees.errors import PygraphError
from pygraph_trees.native import binding

_log = logging.getLogger("pygraph_trees.trees")
_COMPILED = "__compiled_fn"
_CALLS = ("PRECALL", "CALL", "CALL_FUNCTION")
_WRITES = ("STORE_", "DELETE_")  # besides those of local variables


class GuardsDiffer(PygraphError):
    template = (
        "a call of {name} was about to skip Dynamo's guards, but they do not hold; please report this, and set "
        "pygraph_entry to 'short'"
    )


def noting(function: FunctionType, note: Callable[[Sequence[Any]], None]) -> FunctionType:
    """The function, but ``note`` is given the inputs of the compiled code; or as it is, if its code is not known."""

    def call(*inputs: Any) -> Any:
        note(inputs)
        return function.__globals__[name](*inputs)

    def change(instructions: list[Instruction], options: dict[str, Any]) -> None:
        start, _ = _reading(instructions)
        has_null = sys.version_info >= (3, 11) and instructions[start].arg & 1  # LOAD_GLOBAL pushes NULL as well
        null = [create_instruction("PUSH_NULL")] if has_null else []
        instructions[start : start + 1] = [*null, create_instruction("LOAD_CONST", argval=call)]

    name = next((name for name in function.__code__.co_names if name.startswith(_COMPILED)), "")
    return _changed(function, change)


def gathered(
    function: FunctionType, memo: Any, inputs: Sequence[Any], variables: Sequence[Any], every: int
) -> Callable[..., Any]:
    """The function, but C++ gives the inputs, those noted in a call with the memo's ``variables``; or as it is.

    Of its calls, the first ``every`` and each ``every``-th are checked: the inputs are read, too, and compared.
    """

    def change(instructions: list[Instruction], options: dict[str, Any]) -> None:
        start, end = _reading(instructions)
        own = {x.argval for x in instructions[start:end] if x.opname == "STORE_FAST"}
        if any(x.argval in own and x.opname.startswith("LOAD_FAST") for x in instructions[end:]):
            raise LookupError
        taken = create_instruction("LOAD_CONST", argval=binding.extension.take_inputs)
        instructions[end:] = [x for x in instructions[end:] if x.opname != "DELETE_FAST" or x.argval not in own]
        unpacked = create_instruction("UNPACK_SEQUENCE", arg=len(inputs))
        instructions[start + 1 : end] = [taken, *create_call_function(0, True), unpacked]

    places = {id(value): place for place, value in enumerate(variables)}
    made = _changed(function, change)
    try:
        memo.gather([places.get(id(value), value) for value in reversed(inputs)] if made is not function else [])
    except (TypeError, ValueError, RuntimeError):  # an input is neither
        return function
    return made if made is function or not every else _checked(made, function, every)


def _checked(made: FunctionType, function: FunctionType, every: int) -> Callable[..., Any]:
    def compare(inputs: Sequence[Any]) -> None:
        if list(map(id, inputs)) != list(map(id, reversed(own.inputs))):
            raise GuardsDiffer(name=function.__qualname__)

    def call(*args: Any, **kwargs: Any) -> Any:
        number = next(numbers)
        if number >= every and number % every:
            return made(*args, **kwargs)
        own.inputs = binding.extension.take_inputs()
        return reading(*args, **kwargs)

    own, numbers, reading = threading.local(), itertools.count(), noting(function, compare)
    return call


def _reading(instructions: Sequence[Instruction]) -> tuple[int, int]:
    """Where the compiled code is loaded, and where the call begins that takes all that was pushed since."""
    starts = [i for i, x in enumerate(instructions) if str(x.argval).startswith(_COMPILED)]
    depth = 0
    for i in range(starts[0] + 1, len(instructions)) if len(starts) == 1 else ():
        x = instructions[i]
        if x.opname in _CALLS and x.arg == depth:
            return starts[0], i
        if x.opname.startswith(_WRITES) and not x.opname.endswith("_FAST"):
            break
        depth += dis.stack_effect(x.opcode, x.arg if x.opcode >= dis.HAVE_ARGUMENT else None, jump=False)
    raise LookupError


def _changed(function: FunctionType, change: Callable[[list[Instruction], dict[str, Any]], None]) -> FunctionType:
    try:
        code, _ = transform_code_object(function.__code__, change)
    except Exception:
        _log.debug("code that is not known: %s", function, exc_info=True)
        return function
    made = FunctionType(code, function.__globals__, function.__name__, function.__defaults__, function.__closure__)
    made.__kwdefaults__ = function.__kwdefaults__
    return made
