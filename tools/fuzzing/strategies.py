"""Hypothesis strategies for cases.

:func:`cases` draws a program with its inputs, its returned values and the events around its calls. With ``graphs`` it
also draws what only replays accept. The simplest example is a plain program with nothing around its calls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from hypothesis import strategies as st

from .around import EVENTS, NOTHING, PLACES_TO_RUN, SAVED, TANGENTS, TARGETS, THREADS, WHEN, Around
from .case import Case
from .operations import OPERATIONS
from .scope import NoRoom, Scope

Draw = Callable[[st.SearchStrategy[Any]], Any]

MOST_STATEMENTS = 8
_CONSTANTS = 3  # weight of a chain of constants among the operations
MOST_CALLS = 6  # the first warms up, the second records, the rest replay


@st.composite
def cases(draw: Draw, graphs: bool = False) -> Case:
    """Random cases; ``graphs`` adds what only replays accept."""
    backward = _chance(draw, 3)
    main = draw(st.sampled_from(("float32", "float64", "bfloat16", "float16")))
    scope = Scope(draw, main, mutations=not backward)
    known = [o for o in OPERATIONS if not (backward and o.mutates and o.family != "graph break")]
    known += [o for o in OPERATIONS if o.family == "constants"] * (_CONSTANTS - 1)
    for _ in range(draw(st.integers(1, MOST_STATEMENTS))):
        operation = draw(st.sampled_from(known))
        before = scope.state()
        try:
            text = operation.write(scope)
        except NoRoom:
            scope.forget(before)
            continue
        scope.add(text, value=not operation.mutates)
    if not scope.values:
        scope.tensor()
    inputs = tuple(sorted(scope.inputs, key=lambda i: i.parameter))
    case = Case(inputs, tuple(scope.body), _returns(draw, scope), draw(st.integers(3, MOST_CALLS)), backward)
    if not backward:
        case = replace(case, feedback=_feedback(draw, scope, case))
    around = around_of(draw, scope, case, graphs)
    if around.targets or around.threshold:
        case = replace(case, calls=max(case.calls, 4))  # finalizers call from the third call on
    return replace(case, around=around)


def _chance(draw: Draw, one_in: int) -> bool:
    """False in hypothesis's simplest example."""
    found: bool = draw(st.integers(1, one_in)) == one_in
    return found


def around_of(draw: Draw, scope: Scope, case: Case, graphs: bool) -> Around:
    """Draws the events around the calls; usually few."""

    def one_of(choices: Sequence[Any]) -> Any:
        return draw(st.sampled_from(choices))

    around = NOTHING
    # A case's own function is not called from inside if that would change what the calls around it see.
    targets = [t for t in TARGETS if t == "other" or not scope.mutated_parameters()]
    if case.backward:
        if _chance(draw, 3):
            around = replace(around, saved=one_of(SAVED), saved_when=one_of(WHEN))
        if _chance(draw, 3):
            around = replace(around, tangents=_tangents(draw, scope, case, graphs))
    if _chance(draw, 5):
        places = [e for e in EVENTS if _fires(e, around, case)]
        actions = ["collect", *targets]
        events = draw(st.lists(st.tuples(st.sampled_from(places), st.sampled_from(actions)), min_size=1, max_size=3))
        around = replace(around, events=tuple(events))
    if _chance(draw, 6):
        around = replace(around, garbage=one_of(targets), threshold=draw(st.integers(0, 50)))
    if case.backward and around.targets:
        around = replace(around, inner_backward=draw(st.booleans()))
    if _chance(draw, 12):
        kinds = [t for t in THREADS if t != "backward" or case.backward]
        # Some versions of torch reject calls of a thread that has not called before.
        around = replace(around, thread=one_of(kinds), thread_when=one_of(("later", "every other", "later", "always")))
    if _chance(draw, 8):
        around = replace(around, where=one_of(PLACES_TO_RUN), where_when=one_of(("always", "later", "every other")))
    if around.thread is None and _chance(draw, 6):
        around = replace(around, keeps=one_of((0, 1, 3)), step_of=one_of((1, 2, 3)))
    return around


def _fires(event: str, around: Around, case: Case) -> bool:
    if event == "forward hook":
        return True
    return case.backward and (event not in ("pack", "unpack") or around.saved is not None)


def _tangents(draw: Draw, scope: Scope, case: Case, graphs: bool) -> tuple[tuple[str, str], ...]:
    """A special tangent for one or two of the returned values."""
    tensors = {v.name: v.tensor for v in scope.values}
    fitting = [n for n in case.returns if n in tensors and _is_real_or_complex(tensors[n])]
    names = draw(st.lists(st.sampled_from(fitting), min_size=1, max_size=2, unique=True)) if fitting else []
    return tuple((name, draw(st.sampled_from(_kinds(tensors[name], case, graphs)))) for name in names)


def _is_real_or_complex(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _kinds(tensor: torch.Tensor, case: Case, graphs: bool) -> list[str]:
    """The tangents that fit an output."""
    real = not tensor.is_complex()
    fits = {"none": real and tensor.numel() == 1, "conj": graphs and not real, "missing": len(case.returns) > 1}
    return [kind for kind in TANGENTS if fits.get(kind, True)]


def _returns(draw: Draw, scope: Scope) -> tuple[str, ...]:
    """Some of the values, always with the last one; inputs and views of inputs may be among them."""
    names = [v.name for v in scope.values]
    made = [n for n in names if n.startswith("v")]
    last = made[-1] if made else names[-1]
    others = draw(st.lists(st.sampled_from(names), max_size=3, unique=True))
    constants = [n for n in scope.moved if _chance(draw, 2)] + [n for n in scope.constants if _chance(draw, 12)]
    return tuple(dict.fromkeys([last, *others, *constants]))


def _feedback(draw: Draw, scope: Scope, case: Case) -> tuple[tuple[int, str], ...]:
    """Possibly one returned value that becomes an argument of the next call, and shares memory with no other."""
    if any(item.parameter and item.place not in ("same", "kept") for item in case.inputs):
        return ()  # a moved parameter is recorded again, and a recording's outputs end with its step
    by_name = {v.name: v for v in scope.values}
    shared = {i.shares for i in case.inputs}
    fitting = [
        (position, item.name)
        for position, returned in enumerate(case.returns)
        for item in case.arguments
        if returned in by_name
        and item.shares is None
        and item.name not in shared
        and item.values == "unit"
        and (by_name[returned].root == item.name or by_name[returned].root.startswith("v"))
        and by_name[returned].shape == item.shape
        and by_name[returned].dtype == item.dtype
    ]
    if fitting and draw(st.booleans()):
        return (draw(st.sampled_from(fitting)),)
    return ()
