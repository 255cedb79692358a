"""The sources of the compiled parts, as a hash that each part is built with and asked for when it is loaded.

A part that was built from older sources would be called in a way that it does not know. setup.py runs this file by
itself, so it imports nothing of the package. If the sources are not beside it, as in a wheel, the parts came with it.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from types import ModuleType

_FOLDER = Path(__file__).resolve().parent


def sources_hash(folder: Path = _FOLDER) -> str | None:
    """SHA-256 of the C and C++ files in a folder, with their names; None where there are none."""
    files = sorted(path for path in folder.iterdir() if path.suffix in (".c", ".cpp", ".h"))
    digest = hashlib.sha256()
    for path in files:
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest() if files else None


def is_of_these_sources(module: ModuleType) -> bool:
    """Whether a compiled part was built from the sources that are there."""
    sources = sources_hash()
    return sources is None or getattr(module, "SOURCES", None) == sources
