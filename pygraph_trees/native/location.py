"""The folder of the built modules: one for each version of Python, of torch, and of the sources.

Modules built from other sources, or for another torch, are in another folder and are not found. The folder is in
torch's folder for extensions (``TORCH_EXTENSIONS_DIR``, or ``~/.cache/torch_extensions``). This file imports nothing
from the package.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import sys
from pathlib import Path

SOURCES = Path(__file__).resolve().parent


def sources_hash(folder: Path = SOURCES) -> str:
    """SHA-256 of the C++ files in a folder, with their names: 64 hexadecimal digits."""
    digest = hashlib.sha256()
    for path in sorted(path for path in folder.iterdir() if path.suffix in (".cpp", ".h")):
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
    folder = torch_folder()
    try:
        text = "" if folder is None else (folder / "version.py").read_text(encoding="utf-8")
    except OSError:
        text = ""
    found = re.search(r"^__version__ = ['\"]([^'\"]+)", text, re.M)
    return "none" if found is None else found[1]


def build_folder(torch_version: str) -> Path:
    """The folder for this Python and a torch version such as ``"2.13.0+cpu"``; it need not exist."""
    root = os.environ.get("TORCH_EXTENSIONS_DIR")
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    base = Path(root) if root else Path(cache) / "torch_extensions"
    name = f"{sys.implementation.cache_tag}-torch{torch_version}-{sources_hash()[:16]}"
    return base.expanduser() / "pygraph_trees" / name
