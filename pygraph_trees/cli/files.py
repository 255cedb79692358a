"""The files that options of commands name: those that are written, and the measurements to compare with.

Before a command starts, :func:`check` raises :class:`DestinationError` for the first file that cannot be written or
that two options name, so that no measurement is lost. Existing files stay unchanged, and no new file remains.
:func:`read_baseline` and :func:`slower` compare with a file that ``compare --json`` wrote.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pygraph_trees.errors import PygraphError

if TYPE_CHECKING:
    from pygraph_trees.benchmark.outcome import Measurement

Latencies = Mapping[tuple[str, str, str], float | None]  # in ms, by workload, way and regime


class DestinationError(PygraphError):
    template = "{option} {path}: {problem}; expected a file that can be written, in a folder that is there"


class NoBaseline(PygraphError):
    template = "{path} is not a baseline: {why}; expected a file written by compare --json"


class OtherGpu(PygraphError):
    template = "{path} was measured on {before}, and this is {now}: times of different GPUs are not compared"


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


def read_baseline(path: Path, gpu: str) -> Latencies:
    """The measurements in a file, which must be of this ``gpu``."""
    try:
        found: Any = json.loads(path.read_text(encoding="utf-8"))
        before = found["report"]["environment"]["gpu"]
        times = {(m["workload"], m["way"], m["regime"]): m["latency_ms"] for m in found["measurements"]}
    except (OSError, ValueError) as error:
        raise NoBaseline(path=path, why=str(error)) from error
    except (KeyError, TypeError) as error:
        raise NoBaseline(path=path, why="it has no measurements") from error
    if before != gpu:
        raise OtherGpu(path=path, before=before, now=gpu)
    return times


def slower(measurements: Sequence[Measurement], path: Path, times: Latencies, tolerance: float) -> Iterator[str]:
    """A line for each way and regime slower by over ``tolerance``, a share; NoBaseline if none was measured."""
    found = [(m, times.get((m.workload, m.way, m.regime))) for m in measurements]
    if not any(before for _, before in found):
        raise NoBaseline(path=path, why="it has no measurement of this program")
    for m, before in found:
        if before and m.latency_ms and m.latency_ms > before * (1 + tolerance):
            more = m.latency_ms / before - 1
            yield f"{m.way}, {m.regime} inputs: {m.latency_ms:.3f} ms, {before:.3f} ms before ({more:+.0%})"
