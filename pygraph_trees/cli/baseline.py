"""Compares measurements with earlier ones, from a file that ``compare --json`` wrote."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pygraph_trees.errors import PygraphError

if TYPE_CHECKING:
    from pygraph_trees.benchmark.outcome import Measurement

Latencies = Mapping[tuple[str, str, str], float | None]  # in ms, by workload, way and regime


class NoBaseline(PygraphError):
    template = "{path} is not a baseline: {why}; expected a file written by compare --json"


class OtherGpu(PygraphError):
    template = "{path} was measured on {before}, and this is {now}: times of different GPUs are not compared"


def read(path: Path, gpu: str) -> Latencies:
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
