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

import torch
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
# The first instruction of a call with arguments by position.
_CALL = "CALL_FUNCTION" if sys.version_info < (3, 11) else "PRECALL" if sys.version_info < (3, 12) else "CALL"
_WRITES = ("STORE_", "DELETE_")  # besides those of local variables
_DISABLED = torch._dynamo.disable(lambda: None).__code__  # of what torch puts around compiled code


class GuardsDiffer(PygraphError):
    template = (
        "a call of {name} was about to skip Dynamo's guards, but they do not hold; please report this, and set "
        "pygraph_entry to 'short'"
    )


def locals_of(direct: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The variables of a direct call's function, by name."""
    found: dict[str, Any] = direct.bind(*args, **kwargs)
    for name, cell in zip(direct.target.__code__.co_freevars, direct.target.__closure__ or (), strict=True):
        found[name] = cell.cell_contents
    return found


def noting_call(
    direct: Any, memo: Any, function: FunctionType, variables: list[Any], /, *args: Any, **kwargs: Any
) -> Any:
    """Notes the inputs of the compiled code, which later calls get from C++."""
    noted, values = list[Any](), list[Any]()
    noting_inputs, local_variables = noting(function, noted.append), locals_of(direct, args, kwargs)
    for is_global, name, item in variables:  # the call may give them other values
        value = (function.__globals__ if is_global else local_variables)[name]
        values.append(value if item is None else value[item])
    result = noting_inputs(*args, **kwargs)
    if len(noted) != 1 or not gather(memo, function, noted[0], values, direct.every):
        memo.gather([], function)
    return result


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


def gather(memo: Any, function: FunctionType, inputs: Sequence[Any], variables: Sequence[Any], every: int) -> bool:
    """Lets C++ give the inputs, those noted in a call with the memo's ``variables``, if the function's code is known.

    Of its calls, the first ``every`` and each ``every``-th are checked: the inputs are read, too, and compared.
    """

    def change(instructions: list[Instruction], options: dict[str, Any]) -> None:
        start, end = _reading(instructions)
        own = {x.argval for x in instructions[start:end] if x.opname == "STORE_FAST"}
        is_read = any(x.argval in own and x.opname.startswith("LOAD_FAST") for x in instructions[end:])
        if is_read or instructions[end].arg != len(inputs):
            raise LookupError
        taken = create_instruction("LOAD_CONST", argval=binding.extension.take_inputs)
        # A call that Dynamo does not see has no callback of Dynamo's to take off.
        is_bare = getattr(function.__globals__[instructions[start].argval], "__code__", None) is not _DISABLED
        inner = () if is_bare else (create_instruction("LOAD_ATTR", argval="_torchdynamo_orig_callable"),)
        instructions[end:] = [x for x in instructions[end:] if x.opname != "DELETE_FAST" or x.argval not in own]
        unpacked = create_instruction("UNPACK_SEQUENCE", arg=len(inputs))
        instructions[start + 1 : end] = [*inner, taken, *create_call_function(0, True), unpacked]

    if not all(isinstance(value, torch.Tensor) for value in inputs):  # others may differ in the next call
        return False
    if (made := _changed(function, change)) is function:
        return False
    places = {id(value): place for place, value in enumerate(variables)}
    given = [places.get(id(value), value) for value in reversed(inputs)]
    try:
        memo.gather(given, _checked(made, function, every) if every else made)
    except ValueError:  # an input is neither a variable nor a tensor of a fact
        return False
    return True


def _checked(made: FunctionType, function: FunctionType, every: int) -> Callable[..., Any]:
    def compare(inputs: Sequence[Any]) -> None:
        if list(map(id, inputs)) != list(map(id, reversed(own.__dict__.pop("inputs")))):
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
    """Where the compiled code is loaded, and where the call begins that takes all that was pushed since.

    Conditions that lead around code are taken to do so: since torch 2.15, they ask whether the profiler is active, and
    then no call is direct.
    """
    start, *others = [i for i, x in enumerate(instructions) if str(x.argval).startswith(_COMPILED)]
    numbers = {id(x): i for i, x in enumerate(instructions)}
    i, depth = start + 1, 0
    while i < len(instructions) and not others:
        x = instructions[i]
        if x.opname == _CALL and x.arg == depth:
            return start, i
        if x.opname.startswith(_WRITES) and not x.opname.endswith("_FAST"):
            break
        goes_on = x.target is None or numbers[id(x.target)] <= i
        depth += dis.stack_effect(x.opcode, x.arg if x.opcode >= dis.HAVE_ARGUMENT else None, jump=not goes_on)
        i = i + 1 if goes_on else numbers[id(x.target)]
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
