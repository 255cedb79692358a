"""Makes a failing case smaller: each step removes or simplifies one thing, and is kept if the case still fails.

A step may give a case that cannot run, which does not count as failing. A limit of tries or seconds ends the reduction.
General shrinking does not work here: it needs hundreds of runs, which take minutes with a compilation each, and a
process each if the case kills its process. A few dozen specific steps do as well.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace
from functools import partial
from typing import Any

from .around import NOTHING, Around
from .case import Case, Input


def reduce(case: Case, fails: Callable[[Case], bool], most_tries: int, most_s: float = float("inf")) -> Case:
    """The smallest failing case found within the limits; ``case`` itself is assumed to fail."""
    tries, end = 0, time.monotonic() + most_s
    while True:
        for smaller in reductions(case):
            if tries == most_tries or time.monotonic() >= end:
                return case
            tries += 1
            if fails(smaller):
                case = smaller
                break
        else:
            return case


def reductions(case: Case) -> Iterator[Case]:
    """Cases that are smaller or simpler by one step, the largest steps first."""
    for position in range(len(case.body)):
        yield _without_statement(case, position)
    for plainer in _plainer_around(case.around):
        yield replace(case, around=plainer)
    for position in range(len(case.body)):
        yield from _without_operator(case, position)
    for position in range(len(case.returns) if len(case.returns) > 1 else 0):
        yield _tidied(case, case.body, [(i, name) for i, name in enumerate(case.returns) if i != position])
    for size in sorted({size for item in case.inputs for size in item.shape if size > 2}, reverse=True):
        yield _with_size(case, size, 2)
    if case.calls > 1:
        yield replace(case, calls=case.calls - 1)
    if case.feedback:
        yield replace(case, feedback=())
    if case.backward:
        yield replace(case, backward=False)
    for position, item in enumerate(case.inputs):
        for plainer in _plainer(item):
            inputs = (*case.inputs[:position], plainer, *case.inputs[position + 1 :])
            yield replace(case, inputs=tuple(sorted(inputs, key=lambda i: i.parameter)))


def _plainer_around(around: Around) -> Iterator[Around]:
    """Nothing around the calls, then each field at its default, then lists and numbers shorter by one."""
    if around == NOTHING:
        return
    yield NOTHING
    for field in fields(Around):
        if getattr(around, field.name) != field.default:
            default: dict[str, Any] = {field.name: field.default}
            yield replace(around, **default)
    for name in ("tangents", "events", "beside", "faults"):
        items = getattr(around, name)
        for position in range(len(items) if len(items) > 1 else 0):
            fewer: dict[str, Any] = {name: (*items[:position], *items[position + 1 :])}
            yield replace(around, **fewer)
    if around.step_of > 2:
        yield replace(around, step_of=2)
    if around.keeps > 1:
        yield replace(around, keeps=1)


def _plainer(item: Input) -> Iterator[Input]:
    simplest = {"shares": None, "shift": 0}, {"parameter": False}, {"layout": "contiguous"}, {"place": "same"}
    yield from (plainer for simple in simplest if (plainer := replace(item, **simple)) != item)


def _with_size(case: Case, old: int, new: int) -> Case:
    """The case with one size replaced by another, in all inputs and in the indices below it."""
    inputs = []
    for item in case.inputs:
        shape = tuple(new if size == old else size for size in item.shape)
        values = f"below {new}" if item.values == f"below {old}" else item.values
        inputs.append(replace(item, shape=shape, values=values))
    return replace(case, inputs=tuple(inputs))


def _without_statement(case: Case, position: int) -> Case:
    """The case without a statement and everything that needs its value."""
    body, gone = [], []
    for number, line in enumerate(case.body):
        if number == position or any(_mentions(line, name) for name in gone):
            gone += re.findall(r"^(\w+) = ", line)
        else:
            body.append(line)
    kept = [(i, name) for i, name in enumerate(case.returns) if name not in gone]
    return _tidied(case, body, kept)


def _without_operator(case: Case, position: int) -> Iterator[Case]:
    """The case with one of a statement's operands in place of the statement's value."""
    name, assigned, text = case.body[position].partition(" = ")
    if not assigned or not name.isidentifier():
        return
    earlier = [n for line in case.body[:position] for n in re.findall(r"^(\w+) = ", line)]
    for operand in (n for n in earlier if _mentions(text, n)):
        renamed = partial(re.sub, rf"(?<![\w.]){name}\b", operand)
        body = [*case.body[:position], *map(renamed, case.body[position + 1 :])]
        returns = dict.fromkeys(operand if n == name else n for n in case.returns)
        if len(returns) == len(case.returns):
            yield _tidied(case, body, list(enumerate(returns)))


def _tidied(case: Case, body: Sequence[str], kept: list[tuple[int, str]]) -> Case:
    """``case`` with another body, those of its returned values, and the inputs that they need."""
    made = [name for line in body for name in re.findall(r"^(\w+) = ", line)]
    returns = tuple(name for _, name in kept) or ((made or [case.inputs[0].name])[-1],)
    needed = {i.name for i in case.inputs if any(_mentions(text, i.name) for text in [*body, *returns])}
    needed |= {i.shares for i in case.inputs if i.name in needed and i.shares is not None}
    position_of = {old: new for new, (old, _) in enumerate(kept)}
    feedback = tuple((position_of[i], name) for i, name in case.feedback if i in position_of and name in needed)
    inputs = tuple(i for i in case.inputs if i.name in needed)
    around = replace(case.around, tangents=tuple(t for t in case.around.tangents if t[0] in returns))
    return replace(case, inputs=inputs, body=tuple(body), returns=returns, feedback=feedback, around=around)


def _mentions(text: str, name: str) -> bool:
    return re.search(rf"(?<![\w.]){name}\b", text) is not None
