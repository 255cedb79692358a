"""A patch: one reversible change of one torch module.

:meth:`Patch.mismatches` compares the target's fingerprints (:mod:`.fingerprints`) with the definitions that a probe
finds; a patch that does not fit is never applied. :meth:`Patch.apply` returns the function that restores the original
objects, unless other code has replaced the target in the meantime: then it warns.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from types import CodeType, ModuleType
from typing import Any

from .fingerprints import FINGERPRINTS, Fingerprint, Version


class PatchWarning(UserWarning):
    """Base of this package's warnings. The package is usable without torch, so it has its own base."""

    template: str

    def __init__(self, **fields: object) -> None:
        self._fields = fields
        super().__init__(self.template.format(**fields))

    def __reduce__(self) -> tuple[Any, ...]:
        return functools.partial(type(self), **self._fields), ()


class PatchOverwritten(PatchWarning):
    template = "{target} was replaced by other code after pygraph_trees patched it; it is left as it is"


class FeatureOff(PatchWarning):
    template = "pygraph_trees: {feature} stays off on torch {torch}, which keeps its own behaviour there: {why}"


class TorchUnknown(PatchWarning):
    template = "pygraph_trees supports torch {known}; torch {torch} is not patched"


@dataclass(frozen=True, slots=True)
class Definition:
    """A definition that a probe found under a name."""

    parameters: tuple[str, ...] | None  # None for a definition without parameters of its own
    uses: frozenset[str]


class LiveProbe:
    """Finds definitions in imported modules, in microseconds each; reads no source."""

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
        if (code := getattr(found, "__code__", None)) is None:
            return Definition(None, frozenset(vars(found)) if isinstance(found, type) else frozenset())
        return Definition(code.co_varnames[: code.co_argcount + code.co_kwonlyargcount], frozenset(_names(code)))


def _names(code: CodeType) -> set[str]:
    names = {*code.co_names, *code.co_varnames, *code.co_freevars, *code.co_cellvars}
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names |= _names(constant)
        elif isinstance(constant, str):
            names.add(constant)
    return names


@dataclass(frozen=True, slots=True)
class Patch:
    """The base of patches. ``apply`` changes the target and returns the function that undoes this."""

    feature: str  # for example "trees"; a feature is on or off as a whole
    module: str
    name: str  # inside the module; dotted for a member of a class

    @property
    def target(self) -> str:
        return f"{self.module}.{self.name}"

    def apply(self) -> Callable[[], None]:
        raise NotImplementedError

    @property
    def versions(self) -> str:
        found = FINGERPRINTS[self.target]
        return f"{_dotted(min(row.since for row in found))} to {_dotted(max(row.until for row in found))}"

    def fingerprints_for(self, version: Version) -> list[Fingerprint]:
        """The definitions on which the patch relies in this torch version; empty if it was not written for it."""
        return [row for row in FINGERPRINTS[self.target] if row.since <= version <= row.until]

    def mismatches(self, probe: Any, version: Version) -> list[str]:
        """What does not fit on this torch, by a :class:`LiveProbe` or one of source files; empty if the patch fits."""
        if not (wanted := self.fingerprints_for(version)):
            return [f"{self.target}: written for torch {self.versions}, this is {_dotted(version)}"]
        return [line for row in wanted for line in _compare(row, probe)]


def _compare(wanted: Fingerprint, probe: Any) -> list[str]:
    if (found := probe.find(wanted.module, wanted.name)) is None:
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
    """Rebinds an attribute of a module or class to the object that ``replace`` makes from the original."""

    replace: Callable[[Any], Any]

    def apply(self) -> Callable[[], None]:
        owner: ModuleType | type = importlib.import_module(self.module)
        *path, attribute = self.name.split(".")
        for part in path:
            owner = getattr(owner, part)
        original, is_inherited = inspect.getattr_static(owner, attribute), attribute not in vars(owner)
        replacement = self.replace(original)
        setattr(owner, attribute, replacement)

        def undo() -> None:
            if inspect.getattr_static(owner, attribute) is not replacement:
                warnings.warn(PatchOverwritten(target=self.target), stacklevel=3)
            elif is_inherited:
                delattr(owner, attribute)
            else:
                setattr(owner, attribute, original)

        return undo


@dataclass(frozen=True, slots=True)
class IfThere(Rebind):
    """A rebinding of a name that some versions of torch lack; fingerprints tell what these have instead."""

    def apply(self) -> Callable[[], None]:
        return (lambda: None) if LiveProbe().find(self.module, self.name) is None else Rebind.apply(self)


@dataclass(frozen=True, slots=True)
class OnDemand(Rebind):
    """A rebinding that is offered to other code, and applied while that code needs it."""

    offer: Callable[[Callable[[], Callable[[], None]]], Callable[[], None]]  # returns the function that withdraws it

    def apply(self) -> Callable[[], None]:
        return self.offer(functools.partial(Rebind.apply, self))


def made_by(path: str) -> Callable[[Any], Any]:
    """For :attr:`Rebind.replace`: the class with this name, or what the function makes of the original."""

    def replace(original: Any) -> Any:
        module, _, name = path.rpartition(".")
        found = getattr(importlib.import_module(module), name)
        return found if isinstance(found, type) else found(original)

    return replace
