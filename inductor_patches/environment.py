"""The ``PYGRAPH_`` variables of the environment.

An empty variable counts as unset. An invalid value is ignored: its default holds, and one warning names the variable,
the value and the allowed ones. For an unknown variable, a warning names the most similar one. Nothing raises. This
module needs neither torch nor ``pygraph_trees``.
"""

from __future__ import annotations

import contextlib
import difflib
import os
import warnings
from collections.abc import Iterable, Sequence

from .patch import PatchWarning

DISABLE = "PYGRAPH_DISABLE"
BUILD = "PYGRAPH_BUILD"
PREFIX = "PYGRAPH_"
# Variables that only the tests read.
_OTHERS = ("PYGRAPH_FUZZ_PROGRAMS", "PYGRAPH_REPLAYS", "PYGRAPH_STEPS", "PYGRAPH_STRESS", "PYGRAPH_TEST_PART")
_ON, _OFF = ("1", "true", "yes", "on"), ("0", "false", "no", "off")
_told: set[tuple[str, str]] = set()  # variables and values that were warned of


class ValueIgnored(PatchWarning):
    template = "pygraph_trees: {variable}={value!r} is ignored: it must be one of {allowed}.{hint} {instead}"


class VariableIgnored(PatchWarning):
    template = "pygraph_trees: {variable} is ignored: no such variable is known.{hint}"


def disabled() -> bool:
    """Whether ``PYGRAPH_DISABLE`` is on, so that torch must not be patched; false for an invalid value."""
    return choice(DISABLE, ("off", "on"), "The patches go on.") == "on"


def builds() -> bool:
    """Whether the parts in C++ may be built when they are first needed: unless ``PYGRAPH_BUILD`` is off."""
    return choice(BUILD, ("off", "on"), "They are built.") != "off"


def check(flags: Iterable[tuple[str, Sequence[str], str | int]]) -> None:
    """Warns of invalid values of these variables, given with their values and defaults, and of unknown variables."""
    names = {name.removeprefix(PREFIX): name for name in (DISABLE, BUILD, *_OTHERS)}
    for variable, values, default in flags:
        value_of(variable, values, default)
        names[variable.removeprefix(PREFIX)] = variable
    for variable, value in sorted(os.environ.items()):
        if variable.startswith(PREFIX) and variable not in names.values():
            near = difflib.get_close_matches(variable.removeprefix(PREFIX), names, n=1)
            _warn(VariableIgnored, variable, value, f" Did you mean {names[near[0]]}?" if near else "")


def value_of(variable: str, values: Sequence[str], default: str | int) -> str | int | None:
    return choice(variable, values, f"The default {default!r} stays in force.")


def choice(variable: str, values: Sequence[str], instead: str) -> str | int | None:
    """The one of ``values`` that a variable names; None if it is unset, or after a warning if it names none.

    Args:
        values: lower case; if these are "off" and "on", the variable is a switch, and other words count too; without
            any, the variable takes an integer, 0 or more.
        instead: a sentence that tells what holds if the value is ignored.
    """
    value = os.environ.get(variable, "")
    word = value.strip().lower()
    if not word or word in values:
        return word or None
    is_switch = set(values) == {"off", "on"}
    if is_switch and word in (*_ON, *_OFF):
        return "on" if word in _ON else "off"
    if not values and word.isascii() and word.isdigit():
        with contextlib.suppress(ValueError):  # Python's limit of digits
            return int(word)
    words = [*_ON, *_OFF] if is_switch else values
    near = difflib.get_close_matches(word, words, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    allowed = ", ".join(map(repr, words)) or "0, 1, 2 and so on"
    _warn(ValueIgnored, variable, value, hint, allowed=allowed, instead=instead)
    return None


def _warn(kind: type[PatchWarning], variable: str, value: str, hint: str, **fields: str) -> None:
    if (variable, value) not in _told:
        _told.add((variable, value))
        warnings.warn(kind(variable=variable, value=value, hint=hint, **fields), stacklevel=4)
