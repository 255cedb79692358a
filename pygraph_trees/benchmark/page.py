"""The parts of a comparison's page besides the report: each way's figures, bars, and a timeline of one call.

:func:`sections` takes measurements and returns sections of HTML. The timeline is inline SVG. Times are in µs or ms, as
labelled, and bars begin at 0. A missing figure is left out.
"""

from __future__ import annotations

from collections.abc import Sequence

from pygraph_trees.report.markup import Section, render

from .measurement import PLAIN_NAMES, REGIMES, Measurement, cells, speedup
from .trace import Span

_MOST_NAMES = 4  # recordings named per span


def sections(measurements: Sequence[Measurement]) -> list[Section]:
    """The page's sections about measurements."""
    has_timeline = any(m.timeline for m in measurements)
    return [_figures(measurements), *([_timeline(measurements)] if has_timeline else [])]


def _figures(measurements: Sequence[Measurement]) -> Section:
    shown = [m for regime in REGIMES for m in measurements if m.regime == regime and m.latency_ms is not None]
    # Eager is often far slower, and would make the other bars short.
    longest = max([m.latency_ms or 0 for m in shown if m.way != "eager"] or [m.latency_ms or 0 for m in shown] or [0])
    tables = [(head, [[_name(way), *others] for way, *others in rows]) for head, rows in cells(measurements)]
    given = {"measurements": measurements, "shown": shown, "tables": tables, "name": _name}
    body = render("figures", longest_ms=longest or 1.0, speedup=lambda m: speedup(m, measurements), **given)
    return Section("figures", "Figures", body)


def _name(way: str) -> str:
    """The way's name for readers."""
    return PLAIN_NAMES.get(way, way)


def _timeline(measurements: Sequence[Measurement]) -> Section:
    shown = [m for m in measurements if m.timeline and m.regime == "fresh"] or [m for m in measurements if m.timeline]
    # Ways without graphs are often far slower, and would make the others narrow.
    scaled = [m for m in shown if any(span.graphed for span in m.timeline)] or shown
    end_us = max(span.end_us for m in scaled for span in m.timeline)
    step_us = next(s * 10**power for power in range(9) for s in (1, 2, 5) if end_us / (s * 10**power) <= 6)
    body = render("timeline", shown=shown, end_us=end_us, step_us=step_us, name=_name, what=_what, of=_of, rows=_rows)
    return Section("timeline", "A call in time", body)


def _rows(m: Measurement) -> list[list[str]]:
    """A row for each span of a way."""
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
