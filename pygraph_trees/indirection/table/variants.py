"""Variants: a Triton kernel once more, that takes some of its pointers from slots.

A *slot* is 8 bytes of memory that hold an address. :func:`with_slots` takes a kernel, with what it is compiled with,
and names of pointer parameters; in the variant each of these is a ``*i64``, the address of a slot, and the first lines
load the pointer from there. What comes back goes to ``triton.compiler.ASTSource``, with the constants and options of
the original, and the kernel is launched like the original but for the addresses of slots.

What must hold: a slot is written before the kernel that reads it begins, and what it holds is as aligned as the
original's argument had to be, by ``tt.divisibility``. The original, its module and its source stay as they are; a
variant has a copy of its module's names, as they are when it is made. Its text, and so its key in Triton's cache, is
the same in every process, and never the original's.

What cannot have a variant raises :class:`NoVariant`, and nothing has happened.

What does not work, and why: the hint on the integer before it becomes a pointer, or an assumption about it, loses
vector loads; a slot of type pointer to pointer does not compile.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import linecache
import textwrap
import types
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from pygraph_trees.errors import PygraphError

SLOT = "*i64"  # a slot's type in a signature

# Element types by their names in a signature, as Triton's language calls them.
_ELEMENTS = {
    **{f"i{bits}": f"int{bits}" for bits in (1, 8, 16, 32, 64)},
    **{f"u{bits}": f"uint{bits}" for bits in (8, 16, 32, 64)},
    "u1": "int1",
    **{"fp16": "float16", "bf16": "bfloat16", "fp32": "float32", "fp64": "float64"},
    **{f"fp8{form}": f"float8{form}" for form in ("e4nv", "e4b8", "e4b15", "e5", "e5b16")},
}

# Options with which a kernel may not load from a slot.
_REFUSED_OPTIONS = {
    "launch_cooperative_grid": "its blocks must all fit on the GPU at once, and a variant may need more registers",
    "launch_pdl": "it may begin before the slots are written",
}


class NoVariant(PygraphError):
    template = "Triton kernel {kernel!r} has no variant, because {why}."


@dataclass(frozen=True, slots=True)
class Variant:
    """What ``ASTSource`` takes; constants are the original's."""

    fn: Any  # JITFunction
    signature: dict[str, Any]  # by parameter, in the order of the original's
    attrs: dict[tuple[int, ...], Any]  # by path to a parameter; slots have none


def with_slots(
    fn: Any,
    signature: Mapping[str, Any],
    constants: Mapping[Any, Any],
    attrs: Mapping[tuple[int, ...], Any],
    slots: Collection[str],
    options: Mapping[str, Any] | None = None,
) -> Variant:
    """The variant of a kernel in which the parameters named by ``slots`` are slots.

    Args:
        fn: what ``triton.jit`` made.
        signature, constants, attrs: as ``ASTSource`` takes them for the original.
        options: what the original is compiled with, where known.

    Raises :class:`NoVariant`.
    """
    name = getattr(fn, "__name__", type(fn).__name__)

    def refuse(why: str) -> NoVariant:
        return NoVariant(kernel=name, why=why)

    for option, why in _REFUSED_OPTIONS.items():
        if options and options.get(option):
            raise refuse(why)
    why_not = _why_not(fn)
    if why_not is not None:
        raise refuse(why_not)
    arguments: list[str] = fn.arg_names
    if not slots:
        raise refuse("no parameter is to be a slot")
    for slot in slots:
        why_not = _why_no_slot(fn, slot, signature, constants)
        if why_not is not None:
            raise refuse(why_not)
    tree = _definition(fn)
    if tree is None:
        raise refuse("its source cannot be read")
    variable = _left_out_of_keys(fn)
    if variable is not None:
        raise refuse(f"{variable!r} is no tl.constexpr, and Triton's cache does not tell its values apart")

    language = _unused_name("_language", tree)
    chosen = [argument for argument in arguments if argument in slots]
    prologue = [
        _load(language, slot, signature[slot], _divisibility(attrs.get((arguments.index(slot),)))) for slot in chosen
    ]
    return Variant(
        fn=_rebuilt(fn, _text(tree, chosen, prologue), language, chosen),
        signature={argument: SLOT if argument in slots else ty for argument, ty in signature.items()},
        attrs={path: value for path, value in attrs.items() if arguments[path[0]] not in slots},
    )


def _why_not(fn: Any) -> str | None:
    """Why a kernel cannot have a variant, whatever its parameters."""
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    if not isinstance(fn, (JITFunction, InterpretedFunction)):
        return f"it is a {type(fn).__name__}, not what triton.jit makes"
    if fn.fn is None:
        return "its function was left behind in the process that compiled it"
    if isinstance(fn, JITFunction) and fn.is_gluon():
        return "it is written in Gluon"
    return None


def _why_no_slot(fn: Any, slot: str, signature: Mapping[str, Any], constants: Mapping[Any, Any]) -> str | None:
    """Why a parameter cannot be a slot."""
    if slot not in fn.arg_names:
        return f"it has no parameter {slot!r}"
    annotation = inspect.signature(fn.fn).parameters[slot].annotation
    if "constexpr" in (annotation if isinstance(annotation, str) else getattr(annotation, "__name__", "")):
        return f"its parameter {slot!r} is annotated as a constant"
    ty = signature.get(slot)
    if ty in (None, "constexpr") or slot in constants or (fn.arg_names.index(slot),) in constants:
        return f"its parameter {slot!r} is a constant"
    if not isinstance(ty, str) or _element(ty) is None:
        return f"its parameter {slot!r} is of type {ty}, not a pointer to numbers"
    return None


def can_be_slot(fn: Any, name: str, signature: Mapping[str, Any], constants: Mapping[Any, Any]) -> bool:
    """Whether a parameter of a kernel that has its function can be a slot."""
    return fn.fn is not None and _why_no_slot(fn, name, signature, constants) is None


def _element(ty: str) -> str | None:
    """The name in Triton's language of what a pointer points to; None where ``ty`` is no such pointer."""
    if not ty.startswith("*"):
        return None
    return _ELEMENTS.get(ty[1:].removeprefix("k"))  # k: nothing is stored through it


def _divisibility(attributes: Any) -> int | None:
    """What an argument is known to be a multiple of, None where nothing is known."""
    return next((value for key, value in attributes or () if key == "tt.divisibility"), None)


def _left_out_of_keys(fn: Any) -> str | None:
    """A variable that a kernel or a function that it calls uses, and of whose value their keys in a cache know nothing.

    Those of Triton's own modules are what they are.
    """
    from triton.language import constexpr
    from triton.runtime.jit import JITCallable

    todo = [fn] if isinstance(fn, JITCallable) else []  # what is interpreted has no key
    seen = set()
    while todo:
        function = todo.pop()
        if id(function) in seen:
            continue
        seen.add(id(function))
        getattr(function, "cache_key", None)  # finds the variables; those of functions called only if they have theirs
        for (name, _), (value, names) in function.used_global_vals.items():
            if not isinstance(value, constexpr) and not str(names.get("__name__")).startswith("triton."):
                return str(name)
        names = _names(function.fn)
        used = [names.get(node.id) for node in ast.walk(function.parse()) if isinstance(node, ast.Name)]
        todo += [value for value in used if isinstance(value, JITCallable)]
    return None


def _names(function: types.FunctionType) -> dict[str, Any]:
    """Of its module, and of the functions around it."""
    captured = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    return function.__globals__ | {name: cell.cell_contents for name, cell in captured}


def _definition(fn: Any) -> ast.FunctionDef | None:
    """A kernel's definition, without decorators; None where it has none that can be read."""
    try:
        # What triton.jit makes for the interpreter has no source of its own.
        source = fn.src if hasattr(fn, "src") else textwrap.dedent(inspect.getsource(fn.fn))
        (tree,) = ast.parse(source).body
    except (OSError, SyntaxError, TypeError, ValueError):
        return None
    if not isinstance(tree, ast.FunctionDef):
        return None
    tree.decorator_list.clear()
    return tree


def _unused_name(wish: str, tree: ast.FunctionDef) -> str:
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    used |= {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
    while wish in used:
        wish += "_"
    return wish


def _load(language: str, slot: str, ty: str, divisibility: int | None) -> ast.stmt:
    """The statement that replaces a slot's address by the pointer in the slot."""
    pointer = f"{language}.load({slot}).to({language}.pointer_type({language}.{_element(ty)}))"
    if divisibility is not None:
        pointer = f"{language}.multiple_of({pointer}, {divisibility})"
    return ast.parse(f"{slot} = {pointer}").body[0]


def _text(tree: ast.FunctionDef, slots: Collection[str], prologue: list[ast.stmt]) -> str:
    """The variant's source; the docstring stays first, and annotations of slots, which are of another type, go."""
    for parameter in tree.args.args:
        if parameter.arg in slots:
            parameter.annotation = None
    begin = 0 if ast.get_docstring(tree, clean=False) is None else 1
    tree.body[begin:begin] = prologue
    return ast.unparse(ast.fix_missing_locations(tree)) + "\n"


def _rebuilt(fn: Any, text: str, language: str, slots: Collection[str]) -> Any:
    """What ``triton.jit`` makes of a kernel with another text.

    Defaults and annotations are the original's objects: what they were made from may be gone.
    """
    import triton

    original = fn.fn
    # A key holds the constants that helpers use only where these have their keys already: this gives them theirs, so
    # that the variant's is the same whether or not the original was compiled in this process.
    getattr(fn, "cache_key", None)
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    path = f"<variant {digest} of {original.__name__}>"
    # Where triton.jit finds the source; no time of change, so that nobody looks for a file.
    linecache.cache[path] = (len(text), None, text.splitlines(keepends=True), path)
    names = _names(original)
    names[language] = triton.language
    codes = (c for c in compile(text, path, "exec", dont_inherit=True).co_consts if isinstance(c, types.CodeType))
    code = next(c for c in codes if c.co_name == original.__name__)
    function = types.FunctionType(code, names, original.__name__, original.__defaults__)
    function.__annotations__ = {key: ty for key, ty in inspect.get_annotations(original).items() if key not in slots}
    function.__module__ = original.__module__
    # Triton finds functions again by module and qualified name, and calls the kernel by what follows the last dot;
    # Inductor's static launcher looks for a kernel of the function's name.
    function.__qualname__ = f"{digest}.{original.__name__}"
    return triton.jit(function, **_jit_options(fn))


def _jit_options(fn: Any) -> dict[str, Any]:
    """What ``triton.jit`` was given, without the metadata of a launch: a function of the original's arguments."""
    if hasattr(fn, "kwargs"):
        given = dict(fn.kwargs)
    else:
        names = ("version", "do_not_specialize", "do_not_specialize_on_alignment", "debug", "noinline")
        given = {name: getattr(fn, name) for name in names}
        given["repr"] = fn._repr
    given["launch_metadata"] = None
    return given
