"""Earlier measurements of a program, with which new ones are compared, for example in CI.

:meth:`Baseline.read` reads a file that ``compare --json`` wrote. It raises :class:`NoBaseline` for any other file, and
:class:`OtherGpu` if the times are from another GPU than this process has.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pygraph_trees.errors import PygraphError

from .measurement import Measurement


class NoBaseline(PygraphError):
    template = "{path} is not a baseline: {why}; expected a file written by compare --json"


class OtherGpu(PygraphError):
    template = "{path} was measured on {before}, and this is {now}: times of different GPUs are not compared"


@dataclass(frozen=True, slots=True)
class Baseline:
    path: Path
    latency_ms: Mapping[tuple[str, str, str], float | None]  # by workload, way and regime

    @staticmethod
    def read(path: Path, gpu: str) -> Baseline:
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
        return Baseline(path, times)

    def slower(self, measurements: Sequence[Measurement], tolerance: float) -> Iterator[str]:
        """A line for each way and regime whose latency is above the earlier one by more than ``tolerance``, a share.

        Raises:
            NoBaseline: none of them was measured earlier.
        """
        found = [(m, self.latency_ms.get((m.workload, m.way, m.regime))) for m in measurements]
        if not any(before for _, before in found):
            raise NoBaseline(path=self.path, why="it has no measurement of this program")
        for m, before in found:
            if before and m.latency_ms and m.latency_ms > before * (1 + tolerance):
                more = m.latency_ms / before - 1
                yield f"{m.way}, {m.regime} inputs: {m.latency_ms:.3f} ms, {before:.3f} ms before ({more:+.0%})"
