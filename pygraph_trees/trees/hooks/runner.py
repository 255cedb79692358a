"""Replaces the code that Inductor puts around a graph's only partition.

That code reorders the inputs, calls the partition, and returns its outputs, some of them as views. :func:`shortened`
reads the code and returns a function that does the same, or None if the code does anything else. If the partition's
function is from this package, it returns some of the views itself, so that a recording keeps them.
"""

from __future__ import annotations

import ast
import itertools
import re
import textwrap
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from pygraph_trees.report.naming import BACKWARD

from ..functions.fast_path import View, entry
from ..functions.function import text_of

_VIEW = "reinterpret_tensor"  # takes a tensor, sizes, strides and an offset
_RESERVED = frozenset({"self", "args", "partition0_args", _VIEW})


# What Inductor writes, as ``ast.unparse`` shows it: some versions of Python leave out parentheses.
_DEL = r"(?:\n    del [\w, ]+)*"
_METHOD = re.compile(
    r"def call\(self, args\):"
    r"(?:\n    \(?([\w, ]+)\)? = args)?(?:\n    args\.clear\(\))?"
    rf"((?:\n    \w+ = \w+)*){_DEL}"
    rf"\n    partition0_args = \[([\w, ]*)\]{_DEL}"
    rf"\n    \(?([\w, ]*)\)? = self\.partitions\[0\]\(partition0_args\){_DEL}"
    r"\n    return .*"
)


def shortened(call: Any) -> Callable[[list[Any]], Any] | None:
    """Returns a function that does what ``call`` does; None if ``call`` is not a known method of Inductor's ``Runner``.

    If a fast replay may be possible, it has an attribute ``fast_call``, which :func:`~.fast_path.entry` made.
    """
    runner: Any = getattr(call, "__self__", None)
    partitions = getattr(runner, "partitions", None)
    is_known = type(runner).__name__ == "Runner" and not hasattr(call, "__wrapped__")
    if not is_known or not isinstance(partitions, list) or len(partitions) != 1:
        return None
    try:
        (method,) = ast.parse(textwrap.dedent(text_of(call))).body
        code = _read(method)
    except (AttributeError, LookupError, SyntaxError, TypeError, ValueError):
        return None
    names: dict[str, Any] = call.__func__.__globals__
    function: Any = getattr(partitions[0], "function", None)
    is_its_own = getattr(getattr(function, "model", None), "__globals__", None) is names
    own: set[str] = set()  # outputs for which each call returns a new tensor
    if is_its_own and function.first_inside is not None:
        is_backward = function.log.mode == BACKWARD
        code, function.as_returned, own = _with_views_inside(code, names, function.first_inside, renewed=is_backward)
    is_in_order = code.given == list(range(code.count))
    finish = _finish(code, names, own)

    def run(inputs: list[Any]) -> Any:
        kept = [inputs[index] for index in code.kept]
        if not is_in_order:
            inputs[:] = [inputs[index] for index in code.given]
        outputs = runner.partitions[0](inputs)
        return outputs if finish is None else finish.make(*outputs, *kept)

    if sorted(code.given) == list(range(code.count)):
        run.fast_call = _fast_call(runner, code, finish, names.get(_VIEW))  # type: ignore[attr-defined]
    return run


def _fast_call(runner: Any, code: _Code, finish: _Finish | None, view: Any) -> Callable[[list[Any]], Any] | None:
    """Returns a function that gives the outputs of a fast replay, or None with the inputs unchanged."""
    (partition,) = runner.partitions
    function = getattr(partition, "function", None)
    is_known = finish is None or not finish.views or view is torch._C._dynamo.guards._reinterpret_tensor
    if function is None or not is_known:
        return None
    where = {} if finish is None else finish._asdict()
    where.pop("make", None)
    order = None if code.given == list(range(code.count)) else code.given
    return entry(function.dispatch, runner=(runner.partitions, partition), order=order, kept=code.kept, **where)


def _with_views_inside(
    code: _Code, names: dict[str, Any], first: int, *, renewed: bool = False
) -> tuple[_Code, Callable[[Sequence[Any]], Any] | None, set[str]]:
    """Moves views of the outputs that are returned from ``first`` on into the partition's function.

    Returns the code without these views, a function that makes them from the partition's outputs, or None, and, if
    ``renewed``, the outputs for which the code then returns a new tensor at each call.
    """
    uses = Counter(_name_in(value) for value in code.returned)
    ways: dict[str, set[str]] = defaultdict(set)
    for value in code.returned:
        ways[_name_in(value)].add(ast.unparse(value))
    inside: dict[str, ast.Call] = {}  # views, by output
    for value in code.returned[first:]:
        name = _name_in(value)
        is_sole = name in code.made and len(ways[name]) == 1 and (not renewed or uses[name] == 1)
        if isinstance(value, ast.Call) and is_sole:
            inside[name] = value
    returned: list[ast.expr] = []
    for value in code.returned:
        name = _name_in(value)
        uses[name] -= 1
        # If the same view is returned several times, the last one is the partition's own tensor: a forward saves it,
        # and no user holds it.
        if (view := inside.get(name)) is not None:  # of a tensor that already has its layout, and therefore offset 0
            is_given = not uses[name] and not renewed
            value = ast.Name(name) if is_given else ast.Call(view.func, [*view.args[:3], ast.Constant(0)], [])
        returned.append(value)
    given: list[ast.expr] = [inside.get(name, ast.Name(name)) for name in code.outputs]
    finish = _finish(replace(code, returned=given, kept=[], kept_names=[]), names)
    as_returned = None if finish is None else lambda outputs: finish.make(*outputs)
    return replace(code, returned=returned), as_returned, set(inside) if renewed else set()


def _name_in(value: ast.expr) -> str:
    """The name of the returned tensor, without its view; "" for a constant."""
    seen = value.args[0] if isinstance(value, ast.Call) else value
    return seen.id if isinstance(seen, ast.Name) else ""


class _Finish(NamedTuple):
    """Makes the returned values from the partition's outputs and the kept inputs."""

    make: Callable[..., tuple[Any, ...]]
    # What ``make`` does, as arguments of :func:`.fast_path.entry`.
    picks: list[int]
    constants: list[Any]
    views: list[View]
    own: list[int]


def _finish(code: _Code, names: dict[str, Any], own: Collection[str] = ()) -> _Finish | None:
    """None if the outputs are returned unchanged. ``own``: the outputs that already have the layout of their views."""
    if [ast.unparse(value) for value in code.returned] == code.outputs:
        return None
    tensors = code.outputs + code.kept_names
    views = [value for value in code.returned if isinstance(value, ast.Call)]
    constants = [value.value for value in code.returned if isinstance(value, ast.Constant)]
    numbers = {ast.Call: itertools.count(len(tensors)), ast.Constant: itertools.count(len(tensors) + len(views))}
    picks = [tensors.index(v.id) if isinstance(v, ast.Name) else next(numbers[type(v)]) for v in code.returned]
    source = f"lambda {', '.join(tensors)}: ({''.join(f'{ast.unparse(value)}, ' for value in code.returned)})"
    make = eval(compile(source, "<what a graph returns>", "eval"), names)
    own_views = [i for i, value in enumerate(views) if _name_in(value) in own]
    return _Finish(make, picks, constants, [_view(value, tensors) for value in views], own_views)


def _view(call: ast.Call, tensors: list[str]) -> View:
    sizes, strides, *offset = map(ast.literal_eval, call.args[1:])
    return tensors.index(_name_in(call)), sizes, strides, *(offset or [0])


@dataclass(frozen=True, slots=True)
class _Code:
    """What a runner's code does."""

    count: int  # of inputs
    given: list[int]  # inputs, in the partition's order
    outputs: list[str]  # of the partition
    made: set[str]  # outputs that are not inputs
    kept: list[int]  # inputs that are returned, or whose views are
    kept_names: list[str]
    returned: list[ast.expr]  # names of outputs and kept inputs, views of them, and constants


def _read(method: ast.stmt) -> _Code:
    """Raises an error if the code is not as Inductor writes it."""
    found = _METHOD.fullmatch(text := ast.unparse(method))
    match method:
        case ast.FunctionDef(body=[*_, ast.Return(ast.Tuple(values))]) if found is not None:
            inputs, aliases, given, outputs = (re.findall(r"\w+", names or "") for names in found.groups())
        case _:
            raise ValueError
    numbers = {name: number for number, name in enumerate(inputs)}  # of inputs, by each name that they have
    if len(numbers) != len(inputs) or len(set(outputs)) != len(outputs):
        raise ValueError
    for name, source in zip(aliases[::2], aliases[1::2], strict=True):
        numbers[name] = numbers[source]
    kept = [name for name in _used(values) if name not in outputs]
    deleted = re.findall(r"\w+", " ".join(re.findall(r"\n    del (.*)", text)))
    if not _RESERVED.isdisjoint({*numbers, *outputs}) or not {"args", *kept}.isdisjoint(deleted):
        raise ValueError
    made = set(outputs) - numbers.keys()
    passed = [numbers[name] for name in given]
    return _Code(len(inputs), passed, outputs, made, [numbers[name] for name in kept], kept, values)


def _used(values: list[ast.expr]) -> list[str]:
    """The name of each returned tensor, once."""
    names: list[str] = []
    for value in values:
        match value:
            case ast.Call(ast.Name(function), [ast.Name(name), *numbers], []) if function == _VIEW:
                for number in numbers:
                    ast.literal_eval(number)  # raises ValueError if it is not a literal
                names.append(name)
            case ast.Name(name):
                names.append(name)
            case ast.Constant(None | int()):
                pass
            case _:
                raise ValueError
    return list(dict.fromkeys(names))
