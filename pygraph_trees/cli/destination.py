"""Where a command writes, asked before it begins: what it measured would be lost where it could not be written.

:func:`check` takes the files that options name, and raises :class:`DestinationError` for the first that cannot be
written, or that two options name. Whatever is there stays as it is, and nothing new is left behind.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from pygraph_trees.errors import PygraphError


class DestinationError(PygraphError):
    template = "{option} {path}: {problem}; expected a file that can be written, in a folder that is there"


def check(files: Mapping[str, Path | None]) -> None:
    """Raises where a file, by the option that names it, cannot be written later; None is for an option not given."""
    seen: dict[Path, str] = {}
    for option, path in files.items():
        if path is None:
            continue
        problem = _problem(path)
        if problem is None and (other := seen.setdefault(path.resolve(), option)) != option:
            problem = f"{other} names it too"
        if problem is not None:
            raise DestinationError(option=option, path=path, problem=problem)


def _problem(path: Path) -> str | None:
    try:
        if path.is_dir():
            return "that is a folder"
        if path.exists() and not path.is_file():  # a pipe, which whoever reads it would find closed
            return None if os.access(path, os.W_OK) else "it may not be written"
        path = path.resolve()  # what a link leads to is made, and removed again
        is_new = not path.exists()
        with path.open("xb" if is_new else "ab"):  # whose it is, its folder, the disk: all that could be in the way
            pass
        if is_new:
            path.unlink()
    except OSError as error:
        return error.strerror or type(error).__name__
    return None
