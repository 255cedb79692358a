"""The parts of a comparison's page besides the report: each way's figures, bars, and a timeline of one call.

:func:`sections` takes measurements and returns sections of HTML; :func:`write_page` writes the page. Drawings are
inline SVG. Times are in µs or ms, as labelled, and bars begin at 0. A missing figure is left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pygraph_trees.report.markup import Section, render
from pygraph_trees.report.page import page

from .results import PLAIN_NAMES, REGIMES
from .table import cells, speedup

if TYPE_CHECKING:
    from markupsafe import Markup

    from pygraph_trees.report.summary import Report

    from .results import Measurement
    from .trace import Span

_MOST_NAMES = 4  # recordings named per span
_WIDTH, _LEFT, _NOTE = 720, 160, 170  # widths of a drawing, of the labels before its bars, and of the notes after them
_LANE, _GAP = 22, 8  # heights of a lane, and of the gap between two ways


@dataclass(frozen=True, slots=True)
class Bar:
    """The latency of one way in one regime; lengths are those of the drawing."""

    name: str
    kind: str
    ms: str
    width: float
    spread: tuple[float, float] | None  # from the fastest round to the slowest one
    note: str

    @property
    def end(self) -> float:
        return max(self.width, self.spread[1]) if self.spread else self.width


@dataclass(frozen=True, slots=True)
class Drawn:
    """A span in a drawing."""

    kind: str
    x: float
    width: float
    what: str


@dataclass(frozen=True, slots=True)
class Lane:
    """The spans of one way on the host or the GPU."""

    name: str
    y: int
    spans: tuple[Drawn, ...]


@dataclass(frozen=True, slots=True)
class Mark:
    """A mark of the time axis."""

    us: float
    x: float
    anchor: str


def write_page(path: Path, measurements: Sequence[Measurement], report: Report, verdict: Sequence[str]) -> None:
    """Writes a page with a program's measurements and the report about them."""
    name = measurements[0].workload if measurements else "comparison"
    more = {"measurements": [asdict(m) for m in measurements]}
    text = page(report, sections(measurements), name=name, verdict=verdict, more=more)
    path.write_text(text, encoding="utf-8")


def sections(measurements: Sequence[Measurement]) -> list[Section]:
    """The page's sections about measurements."""
    if not measurements:
        return []
    found = [Section("figures", "Figures", _figures(measurements))]
    if any(m.timeline for m in measurements):
        found.append(Section("timeline", "A call in time", _timeline(measurements)))
    return found


def _figures(measurements: Sequence[Measurement]) -> Markup:
    return render(
        "figures",
        measurements=measurements,
        bars=list(_bars(measurements)),
        tables=[(head, [[_name(way), *others] for way, *others in rows]) for head, rows in cells(measurements)],
        name=_name,
        width=_WIDTH,
        left=_LEFT,
    )


def _name(way: str) -> str:
    """The way's name for readers."""
    return PLAIN_NAMES.get(way, way)


def _bars(measurements: Sequence[Measurement]) -> Iterator[Bar]:
    shown = [m for regime in REGIMES for m in measurements if m.regime == regime and m.latency_ms is not None]
    # Eager is often far slower, and would make the other bars short.
    longest = max([m.latency_ms or 0 for m in shown if m.way != "eager"] or [m.latency_ms or 0 for m in shown] or [0])

    def length(ms: float) -> float:
        return min(1.0, ms / (longest or 1.0)) * (_WIDTH - _LEFT - _NOTE)

    for m in shown:
        latency = m.latency_ms or 0
        times = speedup(m, [other for other in measurements if other.regime == m.regime])
        note = f"{latency:.3f} ms" + ("" if times is None else f", {times:.2f}x")
        rounds = m.samples.get("latency_ms", ())
        is_cut = latency > longest
        spread = (length(min(rounds)), length(max(rounds))) if len(rounds) > 1 and not is_cut else None
        kind = "graph" if m.way == "ours" else "rest"
        name = f"{_name(m.way)}, {m.regime}"
        yield Bar(name, kind, f"{latency:.3f}", length(latency), spread, note + (", cut" if is_cut else ""))


def _timeline(measurements: Sequence[Measurement]) -> Markup:
    shown = [m for m in measurements if m.timeline and m.regime == "fresh"] or [m for m in measurements if m.timeline]
    # Ways without graphs are often far slower, and would make the others narrow.
    scaled = [m for m in shown if any(span.graphed for span in m.timeline)] or shown
    end_us = max(span.start_us + span.us for m in scaled for span in m.timeline)
    lanes, y = [], 0
    for m in shown:
        cut = ", cut" if any(span.start_us + span.us > end_us for span in m.timeline) else ""
        for lane in ("host", "gpu"):
            lanes.append(Lane(f"{_name(m.way)}, {lane}{cut}", y, tuple(_drawn(m, lane, end_us))))
            y += _LANE
        y += _GAP
    calls = [
        {"name": _name(m.way), "gpu_us": sum(s.us for s in m.timeline if s.lane == "gpu"), "rows": _rows(m)}
        for m in shown
    ]
    marks = list(_marks(end_us))
    return render("timeline", calls=calls, lanes=lanes, marks=marks, width=_WIDTH, left=_LEFT, height=y)


def _rows(m: Measurement) -> list[list[str]]:
    """A row for each span of a way."""
    return [
        [s.lane, _what(s), _of(s, m), f"{s.start_us:.1f}", f"{s.start_us + s.us:.1f}", f"{s.us:.1f}"]
        for s in m.timeline
    ]


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


def _drawn(m: Measurement, lane: str, end_us: float) -> Iterator[Drawn]:
    scale = (_WIDTH - _LEFT) / end_us
    for span in m.timeline:
        if span.lane == lane and span.start_us < end_us:
            of = f", {_of(span, m)}" if span.graphed else ""
            what = f"{_what(span)}{of}, {span.start_us:.1f} to {span.start_us + span.us:.1f} us"
            width = max(0.6, min(span.us, end_us - span.start_us) * scale)
            yield Drawn("graph" if span.graphed else "other", _LEFT + span.start_us * scale, width, what)


def _marks(end_us: float) -> Iterator[Mark]:
    step = next(s * 10**power for power in range(9) for s in (1, 2, 5) if end_us / (s * 10**power) <= 6)
    mark = 0.0
    while mark <= end_us:
        x = _LEFT + mark / end_us * (_WIDTH - _LEFT)
        yield Mark(mark, x, "end" if x > _WIDTH - 30 else "middle" if mark else "start")
        mark += step
