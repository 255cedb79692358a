"""A program with its inputs, as data: it is drawn, run, made smaller and printed.

The body of a :class:`Case` is Python source, one line per statement, over the names of its inputs. ``Case.text()`` is
Python as well; :func:`read` turns it back into the case, so a printed case is a reproducer. Text that is no case raises
``ValueError``.
"""

from __future__ import annotations

import itertools
import linecache
import re
import zlib
from collections.abc import Callable, Iterable
from dataclasses import MISSING, dataclass, fields
from typing import Any

import torch

from .around import NOTHING, Around
from .faults import Fault

LAYOUTS = (
    "contiguous",
    "transposed",  # the last two dimensions are swapped in memory
    "sliced",  # rows longer than their visible part
    "strided",  # every other element
    "expanded",  # the first dimension repeats one row
    "overlapping",  # rows overlap by half
    "misaligned",  # shifted by one element
    "channels_last",  # four dimensions
)
PLACES = (
    "same",  # one address; each call writes new values there
    "kept",  # one address, written once: the program's own writes stay
    "alternate",  # two addresses in turn
    "fresh",  # a new address each call; old tensors stay alive
    "reused",  # a new address each call; the old memory is freed and written by others
)


@dataclass(frozen=True, slots=True)
class Input:
    """A tensor that the program gets."""

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"
    layout: str = "contiguous"
    place: str = "fresh"
    values: str = "unit"  # "unit" (-1 to 1), "mask", "below 7" (integers), "order" (each index once)
    parameter: bool = False  # held by the module instead of passed; one that moves swaps its storage
    shares: str | None = None  # in that input's memory, `shift` elements after its first one
    shift: int = 0

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)


@dataclass(frozen=True, slots=True)
class Case:
    """A program, its inputs and its number of calls."""

    inputs: tuple[Input, ...]
    body: tuple[str, ...]
    returns: tuple[str, ...]
    calls: int = 4
    backward: bool = False  # gradients of all floating-point inputs are taken and compared
    feedback: tuple[tuple[int, str], ...] = ()  # (returned value, the argument that it becomes at the next call)
    around: Around = NOTHING

    def __post_init__(self) -> None:
        names = [i.name for i in self.inputs]
        known = {i.name: i for i in self.inputs}
        for item in self.inputs:
            if item.layout not in LAYOUTS or item.place not in PLACES:
                raise ValueError(f"{item}: layout is one of {LAYOUTS}, place one of {PLACES}")
            if item.shares is not None and (item.shares not in known or known[item.shares].shares is not None):
                raise ValueError(f"{item} shares the memory of an input that has none of its own")
        if len(known) != len(names):
            raise ValueError(f"input names are not unique: {names}")

    @property
    def arguments(self) -> tuple[Input, ...]:
        return tuple(i for i in self.inputs if not i.parameter)

    @property
    def parameters(self) -> tuple[Input, ...]:
        return tuple(i for i in self.inputs if i.parameter)

    @property
    def constants(self) -> frozenset[str]:
        """Values that the CPU computes from numbers alone."""
        return constants_of(self.body, [i.name for i in self.inputs])[0]

    @property
    def moved_constants(self) -> frozenset[str]:
        """Those values, if they are moved to the device of an input."""
        return constants_of(self.body, [i.name for i in self.inputs])[1]

    def source(self) -> str:
        """The program as a function; with parameters, as a method ``forward``."""
        arguments = [i.name for i in self.arguments]
        held = [f"{i.name} = self.{i.name}" for i in self.parameters]
        name, first = ("forward", ["self"]) if held else ("program", [])
        lines = [*held, *self.body, f"return {', '.join(self.returns)}"]
        return f"def {name}({', '.join([*first, *arguments])}):\n" + "".join(f"    {line}\n" for line in lines)

    def function(self) -> Callable[..., Any]:
        """The program, compiled from its source each time, so no two results share a code object."""
        source = self.source()
        filename = f"<fuzzed {next(_serial)}>"
        linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
        namespace: dict[str, Any] = {"torch": torch, "F": torch.nn.functional}
        exec(compile(source, filename, "exec"), namespace)
        return namespace["forward" if self.parameters else "program"]

    def text(self) -> str:
        """The case as Python that :func:`read` understands, without fields at their defaults."""
        lines = ["Case(", "    inputs=("]
        lines += [f"        {_shown(item)}," for item in self.inputs]
        lines += ["    ),", "    body=("]
        lines += [f"        {line!r}," for line in self.body]
        lines += ["    ),"]
        for field in fields(self)[2:]:
            value = getattr(self, field.name)
            if value != field.default:
                shown = _shown(value) if isinstance(value, Around) else repr(value)
                lines.append(f"    {field.name}={shown},")
        return "\n".join([*lines, ")", ""])


_serial = itertools.count()
_MOVE = re.compile(r"(\w+)\.to\((\w+)\.device\)")


def _shown(item: Input | Around) -> str:
    """A record as Python, without the fields at their defaults; fields without a default come first."""
    required = [repr(getattr(item, f.name)) for f in fields(item) if f.default is MISSING]
    others = [f for f in fields(item) if f.default is not MISSING and getattr(item, f.name) != f.default]
    given = [f"{f.name}={getattr(item, f.name)!r}" for f in others]
    return f"{type(item).__name__}({', '.join([*required, *given])})"


def read(text: str) -> Case:
    """The inverse of :meth:`Case.text`; runs the text as Python.

    Raises:
        ValueError: the text is no case.
    """
    try:
        found = eval(compile(text, "<case>", "eval"), {"Case": Case, "Input": Input, "Around": Around, "Fault": Fault})
    except (SyntaxError, NameError, TypeError) as error:
        raise ValueError(f"this is no case: {error}") from error
    if not isinstance(found, Case):
        raise ValueError(f"this is no case but a {type(found).__name__}")
    return found


def constants_of(body: Iterable[str], inputs: Iterable[str]) -> tuple[frozenset[str], frozenset[str]]:
    """Names whose values come from numbers alone: those on the CPU, and those moved to an input's device."""
    known, on_cpu, moved = set(inputs), set(), set()
    for line in body:
        name, assigned, text = line.partition(" = ")
        if not assigned or not name.isidentifier():
            continue
        known.add(name)
        move = _MOVE.fullmatch(text)
        if move is not None and move[1] in on_cpu:
            moved.add(name)
        elif known.intersection(re.findall(r"(?<![\w.])[a-z]\w*", text)) <= on_cpu:
            on_cpu.add(name)
    return frozenset(on_cpu), frozenset(moved)


def seed_of(*parts: object) -> int:
    """A number that depends on ``parts`` alone, the same in every process."""
    return zlib.crc32(" ".join(map(str, parts)).encode())
