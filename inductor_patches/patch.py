"""A patch: one change of one torch module, what it relies on, and how it is undone.

A :class:`Patch` names its target and carries :class:`Fingerprint` records, one for each span of torch versions it was
written against. A fingerprint lists :class:`Expectation` records: a definition that must exist, the parameters it
must begin with and the names its body must use. :meth:`Patch.mismatches` compares them with what a :class:`Probe`
finds, on live objects here (:class:`LiveProbe`) or on source files (``tools/check_compat``), and returns what does
not fit. A patch that does not fit is never applied.

:meth:`Patch.apply` returns the function that undoes it, putting back the very objects that were there. Where other
code has replaced the target since, undoing leaves that code alone and warns: taking it away would break a stranger.
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


class PatchWarning(UserWarning):
    """Base of the warnings of this package, which stands on its own: what reads it need not have torch."""

    template: str

    def __init__(self, **fields: object) -> None:
        super().__init__(self.template.format(**fields))


class PatchOverwritten(PatchWarning):
    template = "{target} was replaced by other code after pygraph_trees patched it; it is left as it is"


class FeatureOff(PatchWarning):
    template = "pygraph_trees: {feature} stays off on torch {torch}, which keeps its own behaviour there: {why}"


def parse_version(text: str) -> tuple[int, int]:
    """Major and minor number of a torch version: ``"2.13.0+cpu"`` gives ``(2, 13)``."""
    major, minor = text.split(".")[:2]
    return int(major), int(minor)


@dataclass(frozen=True, slots=True)
class Expectation:
    """A definition that a patch relies on."""

    module: str  # dotted, "torch._inductor.scheduler"
    name: str  # inside the module, "Scheduler.graph_partition"
    parameters: tuple[str, ...] | None = None  # the leading parameters, None where they do not matter
    uses: tuple[str, ...] = ()  # what the body must mention: globals, attributes, locals, strings

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """What a patch relies on in the torch versions from ``since`` to ``until``, both included."""

    since: tuple[int, int]
    until: tuple[int, int]
    expectations: tuple[Expectation, ...]


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
    fingerprints: tuple[Fingerprint, ...]
    removable: str  # since which torch version, or on which change upstream, the patch could go

    @property
    @abstractmethod
    def target(self) -> str:
        """What is changed, dotted."""

    @abstractmethod
    def apply(self) -> Callable[[], None]:
        """Changes the target and returns what undoes it."""

    def mismatches(self, probe: Probe, version: tuple[int, int]) -> list[str]:
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


def _dotted(version: tuple[int, int]) -> str:
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
