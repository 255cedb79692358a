"""The hash of the tested and measured code.

:func:`code_hash` covers ``pygraph_trees/``, ``inductor_patches/`` and ``test/gpu/``: Python as syntax trees without
docstrings, so comments and line breaks do not count, in a form that all supported Python versions share; C++ as
text. Nothing of the project is imported. A file that cannot be read raises :class:`OSError`.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

_ROOT = Path(__file__).resolve().parent.parent
PRODUCT = ("pygraph_trees", "inductor_patches")
_TESTED = (*PRODUCT, "test/gpu")
_WITH_DOCSTRING = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def code_hash(root: Path = _ROOT, folders: Sequence[str] = _TESTED) -> str:
    """The SHA-256 of the code in these folders, 64 hexadecimal digits; ``root`` is the checkout's folder."""
    return hash_of(covered_files(root, folders), root)


def hash_of(files: Iterable[Path], root: Path = _ROOT) -> str:
    """The SHA-256 of the code in these files and of their paths below ``root``, 64 hexadecimal digits."""
    digest = hashlib.sha256()
    for path in files:
        digest.update(f"{path.relative_to(root).as_posix()}\n".encode())
        text = path.read_text(encoding="utf-8")
        for piece in _pieces(ast.parse(text)) if path.suffix == ".py" else (text,):
            digest.update(piece.encode())
    return digest.hexdigest()


def covered_files(root: Path = _ROOT, folders: Sequence[str] = _TESTED) -> list[Path]:
    """The files that :func:`code_hash` covers, in hashing order."""
    files = (path for folder in folders for path in (root / folder).rglob("*"))
    return sorted(path for path in files if path.suffix in (".py", ".cpp", ".h"))


def _pieces(value: object) -> Iterator[str]:
    """A syntax tree as text, without empty fields, which differ between Python versions."""
    if isinstance(value, ast.AST):
        yield f"({type(value).__name__}"
        for name, field in ast.iter_fields(value):
            if (
                name == "body"
                and isinstance(value, _WITH_DOCSTRING)
                and ast.get_docstring(value, clean=False) is not None
            ):
                field = field[1:]
            if field is not None and field != []:
                yield f" {name}="
                yield from _pieces(field)
        yield ")"
    elif isinstance(value, list):
        yield "["
        for item in value:
            yield from _pieces(item)
            yield ","
        yield "]"
    else:
        yield repr(value)
