"""The outcome of a comparison: measurements, verdicts, and the report, as text, JSON with these keys, or a page.

A file that ``compare --json`` wrote is a :class:`Baseline` for a later comparison, for example in CI, if both are of
the same GPU. A file that is none raises :class:`NoBaseline`. :func:`sections` makes the parts of a page besides the
report: each way's figures, bars, and a timeline of one call as inline SVG, in which a missing figure is left out.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pygraph_trees.errors import PygraphError
from pygraph_trees.report.markup import Section, Shown, render
from pygraph_trees.report.page import page
from pygraph_trees.report.summary import Report

from .inspection import Span
from .measurement import PLAIN_NAMES, REGIMES, Measurement, cells, speedup, text_table

_MOST_NAMES = 4  # recordings named per span


class NeedsGpu(PygraphError):
    template = "compare needs a GPU, and torch finds none; {instead}"


@dataclass(frozen=True, slots=True)
class Outcome(Shown):
    """What a comparison found."""

    measurements: tuple[Measurement, ...]
    report: Report

    @property
    def failed(self) -> bool:
        """Whether a way raised, or its outputs differ from eager's."""
        return any(m.error for m in self.measurements)

    def to_text(self) -> str:
        """Tables, the verdicts, how far outputs are apart, and the report."""
        return "\n\n".join([text_table(self.measurements), "\n".join(self._lines()), str(self.report)])

    def _page(self) -> str:
        name, more = self.measurements[0].workload, {"measurements": [asdict(m) for m in self.measurements]}
        return page(self.report, sections(self.measurements), name=name, verdict=self._lines(), more=more)

    def _lines(self) -> list[str]:
        return [*verdicts(self.measurements), agreement(self.measurements)]


def verdicts(measurements: Sequence[Measurement]) -> list[str]:
    """For each regime of inputs, how many times as fast ours is as the others: ``ours, same inputs: 2.07x over …``."""
    lines = []
    for ours in (m for regime in REGIMES for m in measurements if m.regime == regime and m.way.startswith("ours")):
        times = {other: speedup(ours, measurements, way) for way, other in PLAIN_NAMES.items()}
        found = ", ".join(f"{ratio:.2f}x over {other}" for other, ratio in times.items() if ratio is not None)
        if found:
            lines.append(f"{ours.way}, {ours.regime} inputs: {found}")
    return lines


def agreement(measurements: Sequence[Measurement]) -> str:
    """One line on outputs: how far each way's are from eager's, and ours from upstream's."""
    parts = []
    for way in ("compile", "upstream", "ours"):
        apart = max((m.max_diff for m in measurements if m.way == way and m.max_diff is not None), default=None)
        if apart is not None:
            parts.append(f"{way} within {apart:.2g}" if apart else f"{way} equal")
    line = f"Outputs against eager: {', '.join(parts) or 'not compared'}"
    ours = [m.max_diff_upstream for m in measurements if m.way == "ours" and m.max_diff_upstream is not None]
    apart_or_equal = f"{max(ours):.2g} apart" if any(ours) else "bit-equal"
    return f"{line}; ours and upstream are {apart_or_equal}." if ours else f"{line}."


def sections(measurements: Sequence[Measurement]) -> list[Section]:
    """The page's sections about measurements."""
    shown = [m for regime in REGIMES for m in measurements if m.regime == regime and m.latency_ms is not None]
    # Eager is often far slower, and would make the other bars short.
    longest = max([m.latency_ms or 0 for m in shown if m.way != "eager"] or [m.latency_ms or 0 for m in shown] or [0])
    tables = [(head, [[_name(way), *others] for way, *others in rows]) for head, rows in cells(measurements)]
    given = {"measurements": measurements, "shown": shown, "tables": tables, "name": _name}
    body = render("figures", longest_ms=longest or 1.0, speedup=lambda m: speedup(m, measurements), **given)
    timed = [m for m in measurements if m.timeline]
    return [Section("figures", "Figures", body), *([_timeline(timed)] if timed else [])]


def _name(way: str) -> str:
    """The way's name for readers."""
    return PLAIN_NAMES.get(way, way)


def _timeline(timed: Sequence[Measurement]) -> Section:
    shown = [m for m in timed if m.regime == "fresh"] or timed
    # Ways without graphs are often far slower, and would make the others narrow.
    scaled = [m for m in shown if any(span.graphed for span in m.timeline)] or shown
    end_us = max(span.end_us for m in scaled for span in m.timeline)
    step_us = next(s * 10**power for power in range(9) for s in (1, 2, 5) if end_us / (s * 10**power) <= 6)
    body = render("timeline", shown=shown, end_us=end_us, step_us=step_us, name=_name, what=_what, of=_of, rows=_rows)
    return Section("timeline", "A call in time", body)


def _rows(m: Measurement) -> list[list[str]]:
    return [[s.lane, _what(s), _of(s, m), f"{s.start_us:.1f}", f"{s.end_us:.1f}", f"{s.us:.1f}"] for s in m.timeline]


def _what(span: Span) -> str:
    if span.lane == "host":
        return "launch of a graph" if span.graphed else "other calls of CUDA"
    return "work of a graph" if span.graphed else "other work"


def _of(span: Span, m: Measurement) -> str:
    """The recordings whose launch or work a span shows; without names, the numbers of the call's launches."""
    if span.launches is None:
        return "not known" if span.graphed else "-"
    first, last = span.launches
    names = m.launches[first : last + 1]
    if names:
        return "; ".join(names if len(names) <= _MOST_NAMES else [*names[:_MOST_NAMES], f"{len(names)} in all"])
    return f"launch {first + 1}" if first == last else f"launches {first + 1} to {last + 1}"


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
        """A line for each way and regime slower by over ``tolerance``, a share; NoBaseline if none was measured."""
        found = [(m, self.latency_ms.get((m.workload, m.way, m.regime))) for m in measurements]
        if not any(before for _, before in found):
            raise NoBaseline(path=self.path, why="it has no measurement of this program")
        for m, before in found:
            if before and m.latency_ms and m.latency_ms > before * (1 + tolerance):
                more = m.latency_ms / before - 1
                yield f"{m.way}, {m.regime} inputs: {m.latency_ms:.3f} ms, {before:.3f} ms before ({more:+.0%})"
