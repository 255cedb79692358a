"""The folders of the built modules: one for each version of Python, of torch, and of the sources.

Modules built from other sources, or for another torch, are in another folder and are not found. Modules that a wheel
brought are in this package; those built here are in torch's folder for extensions (``TORCH_EXTENSIONS_DIR``, or
``~/.cache/torch_extensions``). This file imports nothing from the package.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import re
import sys
from pathlib import Path

SOURCES = Path(__file__).resolve().parent
_PREBUILT = SOURCES / "prebuilt"  # only in distributions made by tools/wheels

# Headers that define the layout of torch's objects. With another layout, a module would load, and then write anywhere.
_LAYOUTS = ("ATen/core", "c10/core", "c10/core/impl", "c10/util", "torch/csrc", "torch/csrc/autograd")


def files_hash(folder: Path = SOURCES, *suffixes: str) -> str:
    """SHA-256 of a folder's C++ files, or of those with other suffixes, and of their names: 64 hexadecimal digits."""
    digest = hashlib.sha256()
    for path in sorted(path for path in folder.iterdir() if path.suffix in (suffixes or (".cpp", ".h"))):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def torch_folder() -> Path | None:
    """The folder of the installed torch, which is not imported; None without one."""
    found = importlib.util.find_spec("torch")
    return None if found is None or found.origin is None else Path(found.origin).resolve().parent


def torch_version() -> str:
    """The version of the installed torch, such as ``"2.13.0+cpu"``; "none" without one. Does not import torch."""
    if "torch" in sys.modules:
        return str(sys.modules["torch"].__version__)
    return version_in(torch_folder() or SOURCES)


def version_in(torch: Path) -> str:
    """The version of the torch in a folder; "none" if it has none."""
    with contextlib.suppress(OSError):
        text = (torch / "version.py").read_text(encoding="utf-8")
        if (found := re.search(r"^__version__ = ['\"]([^'\"]+)", text, re.M)) is not None:
            return found[1]
    return "none"


def build_folder(torch_version: str) -> Path:
    """The folder for this Python and a torch version such as ``"2.13.0+cpu"``; it need not exist."""
    root = os.environ.get("TORCH_EXTENSIONS_DIR")
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    base = Path(root) if root else Path(cache) / "torch_extensions"
    name = f"{sys.implementation.cache_tag}-torch{torch_version}-{files_hash()[:16]}"
    return base.expanduser() / "pygraph_trees" / name


def prebuilt_folder(torch: Path) -> Path:
    """The folder in this package of modules for the torch in a folder, see DESIGN.md; it need not exist.

    Raises ``OSError`` if torch's library or headers cannot be read.
    """
    hashes = [files_hash(), *(files_hash(torch / "include" / folder, ".h") for folder in _LAYOUTS)]
    strings = "cxx11" if b"__cxx11" in (torch / "lib" / "libc10.so").read_bytes() else "cxx98"
    minor = ".".join(version_in(torch).split(".")[:2])
    return _PREBUILT / f"torch{minor}-{strings}-{hashlib.sha256(''.join(hashes).encode()).hexdigest()[:16]}"


def seal(folder: Path) -> Path:
    """The empty file next to a wheel's modules that is named after their hash. Without it, they are incomplete."""
    return folder / f"{files_hash(folder, '.so')}.sha256"


def prebuilt() -> Path | None:
    """The folder of modules that a wheel brought for the installed torch; None if there are none."""
    with contextlib.suppress(OSError):
        if _PREBUILT.is_dir() and (torch := torch_folder()) is not None and (folder := prebuilt_folder(torch)).is_dir():
            return folder
    return None
