"""Draws cases.

:func:`program` draws a program with its inputs, its returned values and the events around its calls. With ``graphs`` it
also draws what only replays accept. A seed and a number give the same case each time.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from .around import BESIDE, EVENTS, HOLDS, PLACES_TO_RUN, SAVED, STREAMS, TANGENTS, TARGETS, THREADS, WHEN, Around
from .case import Case, seed_of
from .faults import FROM_OUTSIDE, OF_OPERATOR, OPERATOR, Fault
from .operations import OPERATIONS
from .scope import Draws, NoRoom, Scope

MOST_STATEMENTS = 8
_CONSTANTS = 3  # weight of a chain of constants among the operations
MOST_CALLS = 6  # the first warms up, the second records, the rest replay
_AFTER_A_FAULT = 4  # calls, in which functions are graphed again


def program(seed: int, number: int, graphs: bool = False) -> Case:
    """A random case; ``graphs`` adds what only replays accept."""
    draws = Draws(seed_of(seed, number))
    backward = draws.chance(3)
    main = draws.choice(("float32", "float64", "bfloat16", "float16"))
    scope = Scope(draws, main, mutations=not backward)
    known = [o for o in OPERATIONS if not (backward and o.mutates and o.family not in ("graph break", "data"))]
    known += [o for o in OPERATIONS if o.family == "constants"] * (_CONSTANTS - 1)
    for _ in range(draws.randint(1, MOST_STATEMENTS)):
        operation = draws.choice(known)
        before = scope.state()
        try:
            text = operation.write(scope)
        except NoRoom:
            scope.forget(before)
            continue
        scope.add(text, value=not operation.mutates)
    fails = draws.chance(4)
    if fails and draws.chance(2) and not scope.has(OPERATOR):
        scope.add(f"{OPERATOR}({scope.tensor()})", value=True)
    if not scope.values:
        scope.tensor()
    inputs = tuple(sorted(scope.inputs, key=lambda i: i.parameter))
    case = Case(inputs, tuple(scope.body), _returns(draws, scope), draws.randint(3, MOST_CALLS), backward)
    if not backward:
        case = replace(case, feedback=_feedback(draws, scope, case))
    around = around_of(draws, scope, case, graphs, fails)
    if around.targets or around.threshold:
        case = replace(case, calls=max(case.calls, 4))  # finalizers call from the third call on
    if around.faults:
        case = replace(case, calls=max(f.call for f in around.faults) + _AFTER_A_FAULT + 1)
    return replace(case, around=around)


def around_of(draws: Draws, scope: Scope, case: Case, graphs: bool, fails: bool) -> Around:
    """Draws the events around the calls; usually few."""
    around = Around()
    # A case's own function is not called from inside if that would change what the calls around it see.
    targets = [t for t in TARGETS if t == "other" or not scope.mutated_parameters()]
    if case.backward:
        if draws.chance(3):
            around = replace(around, saved=draws.choice(SAVED), saved_when=draws.choice(WHEN))
        if draws.chance(3):
            around = replace(around, tangents=_tangents(draws, scope, case, graphs))
    if fails:
        return replace(around, faults=_faults(draws, scope), **_place(draws))
    if not case.backward and not scope.mutated_inputs() and not scope.waits() and draws.chance(4):
        return replace(around, captures=draws.choice(("later", "every other")), **_place(draws))
    if draws.chance(5):
        places = [e for e in EVENTS if _fires(e, around, case)]
        actions = ["collect", *targets]
        events = tuple((draws.choice(places), draws.choice(actions)) for _ in range(draws.randint(1, 3)))
        around = replace(around, events=events)
    if draws.chance(6):
        around = replace(around, garbage=draws.choice(targets), threshold=draws.randint(0, 50))
    if draws.chance(8):
        calls = [(draws.choice(BESIDE), draws.choice(targets)) for _ in range(draws.randint(1, 2))]
        around = replace(around, beside=tuple(calls))
    if case.backward and around.targets:
        around = replace(around, inner_backward=draws.chance(2))
    if draws.chance(12):
        kinds = [t for t in THREADS if t != "backward" or case.backward]
        # Some versions of torch reject calls of a thread that has not called before.
        when = draws.choice(("later", "every other", "later", "always"))
        around = replace(around, thread=draws.choice(kinds), thread_when=when)
    around = replace(around, **_place(draws))
    if around.thread is None and draws.chance(6):
        around = replace(around, keeps=draws.choice((0, 1, 3)), step_of=draws.choice((1, 2, 3)))
    if draws.chance(4):
        holds = [h for h in HOLDS if case.backward or h in ("nothing", "outputs")]
        around = replace(around, holds=draws.choice(holds), holds_when=draws.choice(WHEN))
    if draws.chance(8):
        around = replace(around, reads=draws.choice(WHEN))
    return around


def _place(draws: Draws) -> dict[str, Any]:
    if not draws.chance(6):
        return {}
    when = "always", "later", "every other"
    return {"where": draws.choice((*PLACES_TO_RUN, *STREAMS)), "where_when": draws.choice(when)}


def _faults(draws: Draws, scope: Scope) -> tuple[Fault, ...]:
    """One or two faults of different calls; those of the custom operator only if the program has it."""
    kinds = (*FROM_OUTSIDE, *(OF_OPERATOR * 2 if scope.has(OPERATOR) else ()))
    kind = draws.choice(kinds)
    calls = sorted(draws.several(range(0 if kind in OF_OPERATOR else 1, 5), 2))
    most = {"limit": 6, "at a call": 9, "signal": 12}.get(kind, 3)
    # Interrupts at the beginning of a call are as likely as at its end, whatever its length.
    moments = {"at a call": lambda n: round(2**n * 1.3), "signal": lambda n: 20 * 2 ** (n - 1)}
    return tuple(Fault(kind, call, moments.get(kind, int)(draws.randint(1, most))) for call in calls)


def _fires(event: str, around: Around, case: Case) -> bool:
    if event == "forward hook":
        return True
    return case.backward and (event not in ("pack", "unpack") or around.saved is not None)


def _tangents(draws: Draws, scope: Scope, case: Case, graphs: bool) -> tuple[tuple[str, str], ...]:
    """A special tangent for one or two of the returned values."""
    tensors = {v.name: v.tensor for v in scope.values}
    fitting = [n for n in case.returns if n in tensors and (tensors[n].is_floating_point() or tensors[n].is_complex())]
    return tuple((name, draws.choice(_kinds(tensors[name], case, graphs))) for name in draws.several(fitting, 2))


def _kinds(tensor: torch.Tensor, case: Case, graphs: bool) -> list[str]:
    """The tangents that fit an output."""
    real = not tensor.is_complex()
    fits = {
        "none": real and tensor.numel() == 1,
        "conj": graphs and not real,
        "missing": len(case.returns) > 1,
        # Torch 2.11 drops the graphs, and its code without graphs reads address 0.
        "zero": all(item.layout != "overlapping" for item in case.inputs),
    }
    return [kind for kind in TANGENTS if fits.get(kind, True)]


def _returns(draws: Draws, scope: Scope) -> tuple[str, ...]:
    """Some of the values, always with the last one; inputs and views of inputs may be among them."""
    names = [v.name for v in scope.values]
    made = [n for n in names if n.startswith("v")]
    last = made[-1] if made else names[-1]
    others = draws.several(names, 3, 0)
    constants = [n for n in scope.moved if draws.chance(2)] + [n for n in scope.constants if draws.chance(12)]
    return tuple(dict.fromkeys([last, *others, *constants]))


def _feedback(draws: Draws, scope: Scope, case: Case) -> tuple[tuple[int, str], ...]:
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
    return (draws.choice(fitting),) if fitting and draws.chance(2) else ()
