"""Hypothesis strategies for cases."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from .case import Case
from .operations import OPERATIONS
from .scope import NoRoom, Scope

MOST_STATEMENTS = 8
MOST_CALLS = 6  # the first warms up, the second records, the rest replay


@st.composite
def cases(draw: Callable[[st.SearchStrategy[Any]], Any]) -> Case:
    """Random cases."""
    backward = draw(st.integers(0, 4)) == 4
    main = draw(st.sampled_from(("float32", "float64", "bfloat16", "float16")))
    scope = Scope(draw, main, mutations=not backward)
    known = [o for o in OPERATIONS if not (backward and o.mutates and o.family != "graph break")]
    for _ in range(draw(st.integers(1, MOST_STATEMENTS))):
        operation = draw(st.sampled_from(known))
        before = len(scope.inputs), len(scope.values)
        try:
            text = operation.write(scope)
        except NoRoom:
            scope.forget(*before)
            continue
        scope.add(text, value=not operation.mutates)
    if not scope.values:
        scope.tensor()
    inputs = tuple(sorted(scope.inputs, key=lambda i: i.parameter))
    case = Case(inputs, tuple(scope.body), _returns(draw, scope), draw(st.integers(3, MOST_CALLS)), backward)
    return case if backward else replace(case, feedback=_feedback(draw, scope, case))


def _returns(draw: Callable[[st.SearchStrategy[Any]], Any], scope: Scope) -> tuple[str, ...]:
    """Some of the values, the last one always; inputs and views of inputs may be among them."""
    names = [v.name for v in scope.values]
    made = [n for n in names if n.startswith("v")]
    last = made[-1] if made else names[-1]
    others = draw(st.lists(st.sampled_from(names), max_size=3, unique=True))
    return tuple(dict.fromkeys([last, *others]))


def _feedback(draw: Callable[[st.SearchStrategy[Any]], Any], scope: Scope, case: Case) -> tuple[tuple[int, str], ...]:
    """Possibly one returned value that is an argument of the next call, and shares memory with no other one."""
    if any(item.parameter and item.place not in ("same", "kept") for item in case.inputs):
        return ()  # a parameter that moves is recorded again, and what a recording returned is gone with its step
    by_name = {v.name: v for v in scope.values}
    shared = {i.shares for i in case.inputs}
    fitting = [
        (position, item.name)
        for position, returned in enumerate(case.returns)
        for item in case.arguments
        if item.shares is None
        and item.name not in shared
        and item.values == "unit"
        and (by_name[returned].root == item.name or by_name[returned].root.startswith("v"))
        and by_name[returned].shape == item.shape
        and by_name[returned].dtype == item.dtype
    ]
    if fitting and draw(st.booleans()):
        return (draw(st.sampled_from(fitting)),)
    return ()
