"""Checks, before a command starts, that it can write its output files, so that no measurement is lost.

:func:`check` takes the files that options name. It raises :class:`DestinationError` for the first file that cannot be
written or that two options name. Existing files stay unchanged, and no new file remains.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from pygraph_trees.errors import PygraphError


class DestinationError(PygraphError):
    template = "{option} {path}: {problem}; expected a file that can be written, in a folder that is there"


def check(files: Mapping[str, Path | None]) -> None:
    """Raises if a file, given with the option that names it, cannot be written; None means the option is absent."""
    seen: dict[Path, str] = {}
    for option, path in files.items():
        if path is None:
            continue
        problem = _problem(path)
        if problem is None and (other := seen.setdefault(path.resolve(), option)) != option:
            problem = f"{other} names it too"
        if problem is not None:
            raise DestinationError(option=option, path=path, problem=problem)


def problem_in(folder: Path) -> str | None:
    """Why no file can be written in a folder, which is made if it is not there; None if one can."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return error.strerror
    return _problem(folder / f"probe-{os.getpid()}")


def _problem(path: Path) -> str | None:
    try:
        if path.is_dir():
            return "that is a folder"
        if path.exists() and not path.is_file():  # a pipe: opening it would end its reader's input
            return None if os.access(path, os.W_OK) else "it may not be written"
        path = path.resolve()  # create and remove the target of a link, not the link
        is_new = not path.exists()
        with path.open("xb" if is_new else "ab"):  # tests permissions, the folder and the disk at once
            pass
        if is_new:
            path.unlink()
    except OSError as error:
        return error.strerror or type(error).__name__
    return None
