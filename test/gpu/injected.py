"""Upstream's module of CUDA graph trees, with a failure at any place where it raises or asserts.

:data:`PLACES` lists the statements, found with ``ast`` in the installed torch. :func:`instrumented` gives each function
of the module code that reports before the statement, or before the loop or condition around it, so that the place is
reached although nothing is wrong. The :class:`Injection` tells the code where to raise.
"""

from __future__ import annotations

import ast
import contextlib
import inspect
import types
from collections.abc import Iterator
from typing import Any, NamedTuple

from torch._inductor import cudagraph_trees

from pygraph_trees.trees.managers import calls
from pygraph_trees.trees.recordings import replaying

_HOOK = "_pygraph_trees_test_reached"

# Errors that are not about the trees themselves, by function.
EXEMPT = {
    "get_obj": "how torch finds a thread's trees, before it calls them",
    "cudagraphify": "Inductor's own arguments, at compile time",
    "TreeManagerContainer._finalize_tree_manager": "runs in finalizers",
    "CUDAGraphNode.debug_assert_invariants": "a check for upstream's developers, which is off",
}


class Place(NamedTuple):
    function: str  # qualified name in the module
    line: int  # of the statement
    text: str


def _is_failure(node: ast.AST) -> bool:
    is_check = isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
    return isinstance(node, ast.Raise | ast.Assert) or (is_check and ast.unparse(node).startswith("torch._check("))


class _Reports(ast.NodeTransformer):
    """Puts a call before each top-level statement of a function that contains a failure."""

    def __init__(self) -> None:
        self.places: list[Place] = []
        self._names: list[str] = []

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        return self._inside(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        self._inside(node)
        body: list[ast.stmt] = []
        for statement in node.body:
            for found in self._failures(statement):
                self.places.append(Place(".".join(self._names + [node.name]), found.lineno, ast.unparse(found)[:80]))
                (fails,) = ast.parse(f"if {_HOOK}({found.lineno}):\n    raise AssertionError('injected')").body
                body.append(ast.copy_location(fails, statement))
            body.append(statement)
        node.body = body
        return node

    def _inside(self, node: Any) -> Any:
        self._names.append(node.name)
        self.generic_visit(node)
        self._names.pop()
        return node

    def _failures(self, statement: ast.stmt) -> Iterator[Any]:
        todo: list[ast.AST] = [statement]
        while todo:
            node = todo.pop()
            if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Lambda):
                continue
            if _is_failure(node):
                yield node
            todo += ast.iter_child_nodes(node)


_reports = _Reports()
_tree = ast.fix_missing_locations(_reports.visit(ast.parse(inspect.getsource(cudagraph_trees))))
PLACES = [place for place in _reports.places if place.function not in EXEMPT]


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield constant
            yield from _codes(constant)


def _functions() -> Iterator[types.FunctionType]:
    classes = [replaying.Upstream, calls.Upstream]
    classes += [found for found in vars(cudagraph_trees).values() if inspect.isclass(found)]
    todo = [found for owner in (cudagraph_trees, *classes) for found in vars(owner).values()]
    while todo:
        found = todo.pop()
        if isinstance(found, staticmethod | classmethod):
            todo.append(found.__func__)
        elif isinstance(found, property):
            todo.append(found.fget)
        elif isinstance(found, types.FunctionType):
            if found.__module__ == cudagraph_trees.__name__:
                yield found
            todo.append(getattr(found, "__wrapped__", None))


class Injection:
    """Raises at one place: the first time it is reached, or each time."""

    def __init__(self) -> None:
        self.line, self.is_lasting, self.times = 0, False, 0

    def arm(self, line: int, *, is_lasting: bool) -> None:
        self.line, self.is_lasting, self.times = line, is_lasting, 0

    def reached(self, line: int) -> bool:
        """Whether the code fails at a line that it has reached; it raises itself, as an error of its own module."""
        if line != self.line or (self.times and not self.is_lasting):
            return False
        self.times += 1
        return True


@contextlib.contextmanager
def instrumented() -> Iterator[Injection]:
    """Inside, upstream's functions report to the injection, also those that the package calls or subclasses."""
    found = {(code.co_qualname, code.co_firstlineno): code for code in _codes(compile(_tree, "trees", "exec"))}
    injection, before = Injection(), {}
    for function in _functions():
        code = found.get((function.__code__.co_qualname, function.__code__.co_firstlineno))
        if code is not None and code.co_freevars == function.__code__.co_freevars and function not in before:
            before[function] = function.__code__
            function.__code__ = code
    setattr(cudagraph_trees, _HOOK, injection.reached)
    try:
        yield injection
    finally:
        for function, code in before.items():
            function.__code__ = code
        setattr(cudagraph_trees, _HOOK, lambda line: False)  # functions that were made inside still report
