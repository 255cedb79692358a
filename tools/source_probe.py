"""Finds definitions in the source files of a torch that is not imported: a wheel, or a folder that contains ``torch/``.

:class:`SourceProbe` answers from syntax trees as :class:`inductor_patches.patch.LiveProbe` does from objects. A path
that is neither a wheel nor a folder with torch raises :class:`NoTorchSources`.
"""

from __future__ import annotations

import ast
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path

from inductor_patches.patch import Definition

_Function = (ast.FunctionDef, ast.AsyncFunctionDef)


class NoTorchSources(Exception):
    def __init__(self, path: Path) -> None:
        super().__init__(f"{path}: expected a torch wheel or a folder that holds torch/version.py")


class SourceProbe:
    """The definitions of one torch, read from ``path``."""

    def __init__(self, path: Path) -> None:
        self._wheel = zipfile.ZipFile(path) if path.is_file() and zipfile.is_zipfile(path) else None
        self._root = path
        self._trees: dict[str, ast.Module | None] = {}
        text = self._read("torch/version.py")
        found = re.search(r"__version__ = ['\"]([^'\"]+)['\"]", text or "")
        if found is None:
            raise NoTorchSources(path)
        self.version = found[1]

    def _read(self, name: str) -> str | None:
        try:
            if self._wheel is not None:
                return self._wheel.read(name).decode("utf-8")
            return (self._root / name).read_text(encoding="utf-8")
        except (KeyError, OSError):
            return None

    def _tree(self, module: str) -> ast.Module | None:
        if module not in self._trees:
            path = module.replace(".", "/")
            text = self._read(f"{path}.py") or self._read(f"{path}/__init__.py")
            self._trees[module] = None if text is None else ast.parse(text)
        return self._trees[module]

    def find(self, module: str, name: str) -> Definition | None:
        found: ast.AST | None = self._tree(module)
        for part in name.split("."):
            found = None if found is None else next((d for d in _definitions(found) if d.name == part), None)
        if isinstance(found, _Function):
            arguments = found.args
            named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
            return Definition(tuple(a.arg for a in named), frozenset(_mentioned(found)))
        if isinstance(found, ast.ClassDef):
            return Definition(None, frozenset(_members(found)))
        imports = (s for s in getattr(self._tree(module), "body", []) if isinstance(s, ast.ImportFrom))
        is_imported = any(name == (alias.asname or alias.name) for statement in imports for alias in statement.names)
        return Definition(None, frozenset()) if is_imported else None


def _definitions(scope: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef]:
    """The definitions of a module or class: the last one of a name first, and the first branch's of two branches."""
    for statement in reversed(getattr(scope, "body", [])):
        if isinstance(statement, (*_Function, ast.ClassDef)):
            yield statement
        elif isinstance(statement, (ast.If, ast.Try, ast.With)):
            yield from _definitions(statement)
    for branch in getattr(scope, "handlers", []):
        yield from _definitions(branch)
    if isinstance(scope, (ast.If, ast.Try)) and scope.orelse:
        yield from _definitions(ast.Module(scope.orelse, []))


def _members(scope: ast.ClassDef) -> Iterator[str]:
    for statement in scope.body:
        if isinstance(statement, (*_Function, ast.ClassDef)):
            yield statement.name
        targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
        yield from (t.id for t in targets if isinstance(t, ast.Name))


_TEXT = {ast.Name: "id", ast.Attribute: "attr", ast.arg: "arg", ast.alias: "name", ast.Constant: "value"}


def _mentioned(function: ast.AST) -> Iterator[str]:
    for node in ast.walk(function):
        text = getattr(node, _TEXT[type(node)]) if type(node) in _TEXT else None
        if isinstance(text, str):
            yield text
