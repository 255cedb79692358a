"""Two hashes: of the tested and measured code, and of the code that shapes artifacts in Inductor's caches.

:func:`code_hash` covers ``pygraph_trees/``, ``inductor_patches/`` and ``test/gpu/``: Python as syntax trees without
docstrings, so comments and line breaks do not count, in a form that all supported Python versions share; C++ as
text. :func:`artifact_hash` covers the bytes of :data:`ARTIFACT_CODE` once per process. A file that cannot be read
raises :class:`OSError`.
"""

from __future__ import annotations

import ast
import functools
import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path

_ROOT = Path(__file__).resolve().parent.parent
PRODUCT = ("pygraph_trees", "inductor_patches")
_TESTED = (*PRODUCT, "test/gpu")
# The code that rewrites a graph, decides how it is partitioned, or describes it on its artifact; a folder stands for
# all its modules.
ARTIFACT_CODE = (
    "inductor_patches",
    "pygraph_trees/compat.py",
    "pygraph_trees/report/compiled.py",
    "pygraph_trees/report/log.py",
    "pygraph_trees/report/naming.py",
    "pygraph_trees/report/partitions.py",
    "pygraph_trees/report/records.py",
    "pygraph_trees/errors.py",
    "pygraph_trees/cuda/extent.py",
    "pygraph_trees/cuda/host_reads.py",
    "pygraph_trees/placement",
    "pygraph_trees/settings.py",
    "pygraph_trees/trees/hooks/saved_tensors.py",
    "pygraph_trees/version.py",
)
_WITH_DOCSTRING = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def code_hash(root: Path = _ROOT, folders: Sequence[str] = _TESTED) -> str:
    """The SHA-256 of the code in these folders, 64 hexadecimal digits; ``root`` is the checkout's folder."""
    digest = hashlib.sha256()
    for path in covered_files(root, folders):
        digest.update(f"{path.relative_to(root).as_posix()}\n".encode())
        text = path.read_text(encoding="utf-8")
        for piece in _pieces(ast.parse(text)) if path.suffix == ".py" else (text,):
            digest.update(piece.encode())
    return digest.hexdigest()


@functools.cache
def artifact_hash(root: Path = _ROOT) -> str:
    """The SHA-256 of the files in :data:`ARTIFACT_CODE`, 64 hexadecimal digits; ``root`` holds both packages.

    Computed once per process. Raises :class:`OSError` if a file cannot be read.
    """
    digest = hashlib.sha256()
    for path in artifact_files(root):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(root).as_posix()} {len(content)}\n".encode())
        digest.update(content)
    return digest.hexdigest()


def artifact_files(root: Path = _ROOT) -> list[Path]:
    """The files that :func:`artifact_hash` covers, in hashing order."""
    named = (root / part for part in ARTIFACT_CODE)
    return sorted(file for path in named for file in ([path] if path.suffix == ".py" else path.rglob("*.py")))


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
