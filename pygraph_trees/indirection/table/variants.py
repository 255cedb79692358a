"""Variants: Triton kernels that load some of their pointers from slots, 8 bytes of memory that hold an address.

:func:`with_slots` takes a kernel and names of pointer parameters. In the :class:`Variant`, each of these is a
``*i64``, and the first lines load the pointer. Slots must be written before the kernel starts, and hold addresses as
aligned as ``tt.divisibility`` says. The original does not change. Every process makes the same text. A kernel without a
variant raises :class:`NoVariant`.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import inspect
import linecache
import textwrap
import types
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from pygraph_trees.errors import PygraphError
from pygraph_trees.reasons import Reason, Why

SLOT = "*i64"  # a slot's type in a signature
_LANGUAGE = "_pygraph_language"  # the name of Triton's language in a variant; no kernel uses it

# Names of element types in Triton's language, by their names in a signature.
_ELEMENTS = {
    **{f"i{bits}": f"int{bits}" for bits in (1, 8, 16, 32, 64)},
    **{f"u{bits}": f"uint{bits}" for bits in (8, 16, 32, 64)},
    "u1": "int1",
    **{"fp16": "float16", "bf16": "bfloat16", "fp32": "float32", "fp64": "float64"},
    **{f"fp8{form}": f"float8{form}" for form in ("e4nv", "e4b8", "e4b15", "e5", "e5b16")},
}


class NoVariant(PygraphError):
    template = "Triton kernel {kernel!r} has no variant, because {why}."


@dataclass(frozen=True, slots=True)
class Variant:
    """Arguments for ``ASTSource``; the constants are the original's."""

    fn: Any  # JITFunction
    signature: dict[str, Any]  # by parameter, in the original's order
    attrs: dict[tuple[int, ...], Any]  # by path to a parameter; slots have none
    slots: frozenset[str]  # the parameters that are slots


def with_slots(
    fn: Any,
    signature: Mapping[str, Any],
    constants: Mapping[Any, Any],
    attrs: Mapping[tuple[int, ...], Any],
    names: Collection[str],  # of the parameters that are slots, if they can be
    options: Mapping[str, Any] | None = None,
) -> Variant:
    """The variant of a kernel that ``triton.jit`` made, given the original's arguments for ``ASTSource``."""
    refusal = functools.partial(NoVariant, kernel=getattr(fn, "__name__", type(fn).__name__))
    if (why_not := _why_not(fn, options or {})) is not None:
        raise refusal(why=why_not)
    slots = frozenset(name for name in names if _can_be_slot(fn, name, signature, constants))
    if not slots:
        raise refusal(why=Reason.NO_POINTER())
    if (tree := _definition(fn)) is None:
        raise refusal(why=Reason.NO_SOURCE())
    if (variable := _left_out_of_keys(fn)) is not None:
        raise refusal(why=Reason.GLOBAL_VARIABLE(name=variable))

    chosen = [(i, argument) for i, argument in enumerate(fn.arg_names) if argument in slots]
    prologue = [_load(slot, signature[slot], attrs.get((i,))) for i, slot in chosen]
    begin = 0 if ast.get_docstring(tree, clean=False) is None else 1  # the docstring stays first
    tree.body[begin:begin] = prologue
    for parameter in tree.args.args:
        if parameter.arg in slots:
            parameter.annotation = None  # since its type is another
    return Variant(
        fn=_rebuilt(fn, ast.unparse(ast.fix_missing_locations(tree)) + "\n", slots),
        signature={argument: SLOT if argument in slots else ty for argument, ty in signature.items()},
        attrs={path: value for path, value in attrs.items() if fn.arg_names[path[0]] not in slots},
        slots=slots,
    )


def _why_not(fn: Any, options: Mapping[str, Any]) -> Why | None:
    """Why a kernel cannot have a variant, whatever its parameters."""
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    reasons = (
        (options.get("launch_cooperative_grid"), Reason.COOPERATIVE()),
        (options.get("launch_pdl"), Reason.EARLY()),
        (not isinstance(fn, (JITFunction, InterpretedFunction)), Reason.NOT_TRITON(type=type(fn).__name__)),
        (getattr(fn, "fn", None) is None, Reason.COMPILED_ELSEWHERE()),
        (isinstance(fn, JITFunction) and fn.is_gluon(), Reason.GLUON()),
    )
    return next((why for is_so, why in reasons if is_so), None)


def _can_be_slot(fn: Any, name: str, signature: Mapping[str, Any], constants: Mapping[Any, Any]) -> bool:
    """Whether a parameter is a pointer to numbers, and not a constant."""
    if name not in fn.arg_names or name in constants or (fn.arg_names.index(name),) in constants:
        return False
    annotation = inspect.signature(fn.fn).parameters[name].annotation
    if "constexpr" in (annotation if isinstance(annotation, str) else getattr(annotation, "__name__", "")):
        return False
    ty = signature.get(name)
    return isinstance(ty, str) and _element(ty) is not None


def _element(ty: str) -> str | None:
    """The name, in Triton's language, of a pointer's element type; None if ``ty`` is no pointer to numbers."""
    return _ELEMENTS.get(ty[1:].removeprefix("k")) if ty.startswith("*") else None  # k: nothing is stored through it


def _left_out_of_keys(fn: Any) -> str | None:
    """A global of a kernel, or of a function it calls, that is not Triton's and whose value is not in cache keys."""
    from triton.language import constexpr
    from triton.runtime.jit import JITCallable

    todo = [fn] if isinstance(fn, JITCallable) else []  # an interpreted kernel has no key
    seen = set()
    while todo:
        function = todo.pop()
        if id(function) in seen:
            continue
        seen.add(id(function))
        getattr(function, "cache_key", None)  # collects the globals; those of called functions only if these have a key
        for (name, _), (value, names) in function.used_global_vals.items():
            if not isinstance(value, constexpr) and not str(names.get("__name__")).startswith("triton."):
                return str(name)
        names = _names(function.fn)
        used = [names.get(node.id) for node in ast.walk(function.parse()) if isinstance(node, ast.Name)]
        todo += [value for value in used if isinstance(value, JITCallable)]
    return None


def _names(function: types.FunctionType) -> dict[str, Any]:
    """The names of a function's module and of the functions around it."""
    captured = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    return function.__globals__ | {name: cell.cell_contents for name, cell in captured}


def _definition(fn: Any) -> ast.FunctionDef | None:
    """A kernel's definition, without decorators; None if it cannot be read."""
    try:
        # A kernel that triton.jit makes for the interpreter has no source of its own.
        source = fn.src if hasattr(fn, "src") else textwrap.dedent(inspect.getsource(fn.fn))
        (tree,) = ast.parse(source).body
    except (OSError, SyntaxError, TypeError, ValueError):
        return None
    if not isinstance(tree, ast.FunctionDef):
        return None
    tree.decorator_list.clear()
    return tree


def _load(slot: str, ty: str, attributes: Any) -> ast.stmt:
    """The statement that replaces a slot's address with the pointer in the slot, which is as aligned as is known."""
    pointer = f"{_LANGUAGE}.load({slot}).to({_LANGUAGE}.pointer_type({_LANGUAGE}.{_element(ty)}))"
    divisor = next((value for key, value in attributes or () if key == "tt.divisibility"), None)
    if divisor is not None:
        pointer = f"{_LANGUAGE}.multiple_of({pointer}, {divisor})"
    return ast.parse(f"{slot} = {pointer}").body[0]


def _rebuilt(fn: Any, text: str, slots: Collection[str]) -> Any:
    """The kernel with another text. Defaults and annotations are objects: names in their source may be gone."""
    import triton

    original = fn.fn
    # A key contains the constants that called functions use only if these functions have keys. This makes their keys,
    # so that the variant's key does not depend on whether this process compiled the original.
    getattr(fn, "cache_key", None)
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    path = f"<variant {digest} of {original.__name__}>"
    # triton.jit finds the source here. Without a modification time, linecache does not look for a file.
    linecache.cache[path] = (len(text), None, text.splitlines(keepends=True), path)
    names = _names(original)
    names[_LANGUAGE] = triton.language
    codes = (c for c in compile(text, path, "exec", dont_inherit=True).co_consts if isinstance(c, types.CodeType))
    code = next(c for c in codes if c.co_name == original.__name__)
    function = types.FunctionType(code, names, original.__name__, original.__defaults__)
    function.__annotations__ = {key: ty for key, ty in inspect.get_annotations(original).items() if key not in slots}
    function.__module__ = original.__module__
    # Triton identifies functions by module and qualified name, and names the kernel by the part after the last dot.
    # Inductor's static launcher looks for a kernel with the function's name.
    function.__qualname__ = f"{digest}.{original.__name__}"
    return triton.jit(function, **_jit_options(fn))


def _jit_options(fn: Any) -> dict[str, Any]:
    """The arguments of ``triton.jit``, without ``launch_metadata``, which is a function of the original's arguments."""
    names = ("version", "do_not_specialize", "do_not_specialize_on_alignment", "debug", "noinline")
    given = fn.kwargs if hasattr(fn, "kwargs") else {"repr": fn._repr, **{name: getattr(fn, name) for name in names}}
    return {**given, "launch_metadata": None}
