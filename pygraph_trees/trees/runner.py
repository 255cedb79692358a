"""What Inductor's code does around a graph's only partition, without that code.

Where a graph is one partition, the code around it takes the inputs apart, puts them together in the partition's order,
calls it, and returns what it returned, some of it seen in another way. :func:`shortened` reads that code and does the
same: it orders the list of inputs in place. Code that does anything else stays as it is.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from typing import TYPE_CHECKING, Any

from pygraph_trees.tensors import chosen

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_VIEW = "reinterpret_tensor"  # of a tensor, with sizes, strides and an offset


class _Unknown(Exception):
    """The code does something else."""


def shortened(call: Any) -> Callable[[list[Any]], Any] | None:
    """Does what ``call`` does, the method of Inductor's ``Runner``; None where that is anything else, or not known.

    What comes back may have a function ``steadily``, which gives the outputs for a list of inputs where a steady replay
    will do, and else None.
    """
    runner: Any = getattr(call, "__self__", None)
    partitions = getattr(runner, "partitions", None)
    if type(runner).__name__ != "Runner" or not isinstance(partitions, list) or len(partitions) != 1:
        return None
    try:
        (method,) = ast.parse(textwrap.dedent(inspect.getsource(call))).body
        indices, count, returned = _read(method)
    except (_Unknown, OSError, SyntaxError, TypeError, ValueError):
        return None
    order = chosen(indices, count)
    finish = None if returned is None else eval(returned, call.__func__.__globals__)

    def run(inputs: list[Any]) -> Any:
        if order is not None:
            order(inputs)
        outputs = runner.partitions[0](inputs)
        return outputs if finish is None else finish(*outputs)

    if sorted(indices) == list(range(count)):
        back = chosen([indices.index(index) for index in range(count)], count)
        run.steadily = _steadily(runner, order, back, finish)  # type: ignore[attr-defined]
    return run


def _steadily(
    runner: Any,
    order: Callable[[list[Any]], None] | None,
    back: Callable[[list[Any]], None] | None,
    finish: Callable[..., Any] | None,
) -> Callable[[list[Any]], Any] | None:
    """Gives the outputs if a steady replay of the partition will do, else None and the inputs are as they were."""
    (partition,) = runner.partitions
    function = getattr(partition, "function", None)
    if function is None:
        return None

    def steadily(inputs: list[Any]) -> Any:
        if runner.partitions[0] is not partition:
            return None
        if order is not None:
            order(inputs)
        outputs = function.steadily(inputs)
        if outputs is None:
            function.was_asked = True
            if back is not None:
                back(inputs)
            return None
        return outputs if finish is None else finish(*outputs)

    return steadily


def _read(method: ast.stmt) -> tuple[Sequence[int], int, Any]:
    """The partition's inputs, by index; how many inputs there are; and what makes the outputs of the partition's.

    That is the code of a function of the partition's outputs, None where they are returned as they are.
    """
    if not isinstance(method, ast.FunctionDef) or [a.arg for a in method.args.args] != ["self", "args"]:
        raise _Unknown
    numbers: dict[str, int] = {}  # of the inputs, by name
    count = 0
    given: list[int] | None = None  # to the partition
    outputs: list[str] | None = None
    for statement in method.body:
        match statement:
            case ast.Expr(ast.Call(ast.Attribute(ast.Name("args"), "clear"), [], [])) | ast.Delete():
                pass
            case ast.Assign([ast.Tuple(targets)], ast.Name("args")) if not count:
                count = len(targets)
                numbers = {name: number for number, name in enumerate(_names(targets))}
                if len(numbers) != count:
                    raise _Unknown
            case ast.Assign([ast.Name(name)], ast.List(values)) if outputs is None:
                if name != "partition0_args" or any(value not in numbers for value in _names(values)):
                    raise _Unknown
                given = [numbers[value] for value in _names(values)]
            case ast.Assign([ast.Name(name)], ast.Name(source)) if source in numbers and outputs is None:
                numbers[name] = numbers[source]
            case ast.Assign([ast.Tuple(targets)], call) if given is not None and outputs is None:
                if ast.unparse(call) != "self.partitions[0](partition0_args)":
                    raise _Unknown
                outputs = _names(targets)
            case ast.Return(ast.Tuple(values)) if given is not None and outputs is not None:
                return given, count, _function_of(outputs, values)
            case _:
                raise _Unknown
    raise _Unknown


def _names(expressions: Sequence[ast.expr]) -> list[str]:
    names = [e.id for e in expressions if isinstance(e, ast.Name)]
    if len(names) != len(expressions):
        raise _Unknown
    return names


def _function_of(outputs: list[str], values: list[ast.expr]) -> Any:
    if len(set(outputs)) != len(outputs):
        raise _Unknown
    if [ast.unparse(value) for value in values] == outputs:
        return None
    for value in values:
        match value:
            case ast.Call(ast.Name(function), [ast.Name(name), *numbers], []) if function == _VIEW and name in outputs:
                for number in numbers:
                    ast.literal_eval(number)  # ValueError where it is not one
            case ast.Name(name) if name in outputs:
                pass
            case ast.Constant(None | int()):
                pass
            case _:
                raise _Unknown
    source = f"lambda {', '.join(outputs)}: ({''.join(ast.unparse(value) + ', ' for value in values)})"
    return compile(source, "<outputs of the partition>", "eval")
