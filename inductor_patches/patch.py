"""A patch: one change of one torch module, what it relies on, and how it is undone.

A :class:`Patch` names its target; what it relies on is in the table of :mod:`.fingerprints`. :meth:`Patch.mismatches`
compares that with the definitions that a :class:`Probe` finds, on live objects (:class:`LiveProbe`) or in source files
(``tools/check_compat``), and returns what does not fit. A patch that does not fit is never applied.

:meth:`Patch.apply` returns the function that undoes it, putting back the very objects that were there. If other
code has replaced the target since, undoing leaves that code alone and warns.
"""

from __future__ import annotations

import importlib
import inspect
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from types import CodeType, ModuleType
from typing import Any, Protocol

from .fingerprints import Expectation, Fingerprint, Version, fingerprints_of


class PatchWarning(UserWarning):
    """Base of the warnings of this package, which stands on its own: what reads it need not have torch."""

    template: str

    def __init__(self, **fields: object) -> None:
        super().__init__(self.template.format(**fields))


class PatchOverwritten(PatchWarning):
    template = "{target} was replaced by other code after pygraph_trees patched it; it is left as it is"


class FeatureOff(PatchWarning):
    template = "pygraph_trees: {feature} stays off on torch {torch}, which keeps its own behaviour there: {why}"


@dataclass(frozen=True, slots=True)
class Definition:
    """What a probe found under a name."""

    parameters: tuple[str, ...] | None  # None for what cannot be called with parameters of its own
    uses: frozenset[str]


class Probe(Protocol):
    """Finds definitions, in live modules or in source files."""

    def find(self, module: str, name: str) -> Definition | None: ...


class LiveProbe:
    """Looks at the imported modules; costs microseconds a definition and reads no source."""

    def find(self, module: str, name: str) -> Definition | None:
        try:
            found: Any = importlib.import_module(module)
            for part in name.split("."):
                found = inspect.getattr_static(found, part)
        except (ImportError, AttributeError):
            return None
        if isinstance(found, (staticmethod, classmethod)):
            found = found.__func__
        found = inspect.unwrap(found) if callable(found) else found
        code = getattr(found, "__code__", None)
        if code is None:
            return Definition(None, frozenset(vars(found)) if isinstance(found, type) else frozenset())
        parameters = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        return Definition(parameters, frozenset(_names(code)))


def _names(code: CodeType) -> set[str]:
    names = {*code.co_names, *code.co_varnames, *code.co_freevars, *code.co_cellvars}
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names |= _names(constant)
        elif isinstance(constant, str):
            names.add(constant)
    return names


@dataclass(frozen=True, slots=True)
class Patch(ABC):
    """Base of all patches."""

    feature: str  # "trees": features are switched on and off as a whole
    removable: str  # since which torch version, or on which change upstream, the patch could go

    @property
    @abstractmethod
    def target(self) -> str:
        """What is changed, dotted."""

    @abstractmethod
    def apply(self) -> Callable[[], None]:
        """Changes the target and returns what undoes it."""

    @property
    def fingerprints(self) -> tuple[Fingerprint, ...]:
        """What the patch relies on, by torch version."""
        return fingerprints_of(self.target)

    def mismatches(self, probe: Probe, version: Version) -> list[str]:
        """What does not fit on this torch, one line each; empty where the patch can be applied."""
        spans = [f for f in self.fingerprints if f.since <= version <= f.until]
        if not spans:
            known = ", ".join(f"{_dotted(f.since)} to {_dotted(f.until)}" for f in self.fingerprints)
            return [f"{self.target}: written for torch {known}, this is {_dotted(version)}"]
        return [line for span in spans for wanted in span.expectations for line in _compare(wanted, probe)]


def _compare(wanted: Expectation, probe: Probe) -> list[str]:
    found = probe.find(wanted.module, wanted.name)
    if found is None:
        return [f"{wanted}: not there"]
    if wanted.parameters is not None:
        begin = None if found.parameters is None else found.parameters[: len(wanted.parameters)]
        if begin != wanted.parameters:
            return [f"{wanted}: expected parameters {wanted.parameters}, found {found.parameters}"]
    missing = sorted(set(wanted.uses) - found.uses)
    return [f"{wanted}: no longer uses {', '.join(missing)}"] if missing else []


def _dotted(version: Version) -> str:
    return f"{version[0]}.{version[1]}"


@dataclass(frozen=True, slots=True)
class Rebind(Patch):
    """Rebinds an attribute of a module or class to what ``replace`` makes of the original."""

    module: str
    name: str  # inside the module; dotted for a member of a class
    replace: Callable[[Any], Any]

    @property
    def target(self) -> str:
        return f"{self.module}.{self.name}"

    def apply(self) -> Callable[[], None]:
        owner: ModuleType | type = importlib.import_module(self.module)
        *path, attribute = self.name.split(".")
        for part in path:
            owner = getattr(owner, part)
        original = inspect.getattr_static(owner, attribute)
        replacement = self.replace(original)
        setattr(owner, attribute, replacement)

        def undo() -> None:
            if inspect.getattr_static(owner, attribute) is replacement:
                setattr(owner, attribute, original)
            else:
                warnings.warn(PatchOverwritten(target=self.target), stacklevel=3)

        return undo
