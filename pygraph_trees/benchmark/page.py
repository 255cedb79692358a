"""The parts of a comparison's page besides the report: figures of each way, bars, and a timeline of one call.

:func:`sections` takes measurements and returns sections of HTML; :func:`write_page` writes the page. Drawings are
inline SVG. Times are in µs or ms, as labelled, and bars begin at 0. A missing figure is left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from pygraph_trees.report.markup import Section, counted, escaped, opened, scrolled, table
from pygraph_trees.report.page import page

from .results import REGIMES
from .table import cells, speedup

if TYPE_CHECKING:
    from pygraph_trees.report.summary import Report

    from .results import Measurement
    from .trace import Span

_MOST_NAMES = 4  # recordings named per span
_WIDTH, _LEFT, _NOTE = 720, 140, 130  # widths of a drawing, of the labels before its bars, and of the notes after them


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
        found.append(Section("timeline", "A call in time", _timelines(measurements)))
    return found


def _figures(measurements: Sequence[Measurement]) -> str:
    parts = [
        "<p><em>Same</em> inputs are the same tensors at each call, <em>fresh</em> ones lie elsewhere than at the call "
        "before. Latency is with a wait for the GPU at each call, ms/call without; host is the time until a call "
        "returns, graph the GPU's time inside of CUDA graphs; x is how many times as fast as upstream.</p>"
    ]
    for m in measurements:
        if m.error is not None:
            parts.append(f'<p class="bad">{escaped(m.way)}, {m.regime} inputs, failed: {escaped(m.error)}</p>')
    parts.append("<h3>Latency, ms</h3>" + _bars(measurements))
    for head, rows in cells(measurements):
        parts.append(table(head, rows, label="figures: " + ", ".join(head)))
    return "".join(parts)


def _bars(measurements: Sequence[Measurement]) -> str:
    shown = [m for regime in REGIMES for m in measurements if m.regime == regime and m.latency_ms is not None]
    if not shown:
        return "<p>Nothing was measured.</p>"
    # Eager is often far slower, and would make the other bars short.
    longest = max(m.latency_ms or 0 for m in [m for m in shown if m.way != "eager"] or shown) or 1.0
    row, rows = 24, []
    for number, m in enumerate(shown):
        y = number * row
        share = (m.latency_ms or 0) / longest
        width = min(1.0, share) * (_WIDTH - _LEFT - _NOTE)
        times = speedup(m, [other for other in measurements if other.regime == m.regime])
        note = f"{m.latency_ms:.3f} ms" + ("" if times is None else f", {times:.2f}x") + (", cut" if share > 1 else "")
        kind = "graph" if m.way == "ours" else "rest"
        rows.append(
            f'<text x="8" y="{y + 16}">{escaped(m.way)}, {m.regime}</text>'
            f'<rect class="{kind}" x="{_LEFT}" y="{y + 4}" width="{max(1.0, width):.1f}" height="16" rx="2"/>'
            f'<text x="{_LEFT + 6 + width:.1f}" y="{y + 16}">{note}</text>'
        )
    label = "; ".join(f"{m.way}, {m.regime} inputs: {m.latency_ms:.3f} ms" for m in shown)
    return _drawing("".join(rows), len(shown) * row, label)


def _timelines(measurements: Sequence[Measurement]) -> str:
    shown = [m for m in measurements if m.timeline and m.regime == "fresh"] or [m for m in measurements if m.timeline]
    end = max(span.start_us + span.us for m in shown for span in m.timeline)
    legend = (
        '<p><span class="key in"></span> launches of graphs and work inside of them, <span class="key out"></span> all '
        "other calls of CUDA and work. One call of each way under a profiler, which makes the host slower; fresh "
        "inputs where they were measured.</p>"
    )
    rows, y = [], 0
    for m in shown:
        for lane in ("host", "gpu"):
            rows.append(f'<text x="8" y="{y + 15}">{escaped(m.way)}, {lane}</text>')
            rows.append(f'<rect class="lane" x="{_LEFT}" y="{y + 2}" width="{_WIDTH - _LEFT}" height="18"/>')
            rows += _spans(m, lane, y, end)
            y += 22
        y += 8
    rows += _axis(end, y)
    label = "; ".join(f"{m.way}: {sum(s.us for s in m.timeline if s.lane == 'gpu'):.0f} us of the GPU" for m in shown)
    return legend + _drawing("".join(rows), y + 22, label) + "".join(_listed(m) for m in shown)


def _listed(m: Measurement) -> str:
    """The spans of a way as a table."""
    rows = [
        [s.lane, _what(s), _of(s, m), f"{s.start_us:.1f}", f"{s.start_us + s.us:.1f}", f"{s.us:.1f}"]
        for s in m.timeline
    ]
    head = ["of the", "what", "recording", "from us", "to us", "us"]
    listed = table(head, rows, words=(2,), label=f"a call of {m.way} in time")
    return opened(f"<strong>{escaped(m.way)}</strong>: {counted(len(rows), 'span')}", listed)


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


def _spans(m: Measurement, lane: str, y: int, end_us: float) -> Iterator[str]:
    scale = (_WIDTH - _LEFT) / end_us
    for span in m.timeline:
        if span.lane == lane:
            x, width = _LEFT + span.start_us * scale, max(0.6, span.us * scale)
            of = f", {_of(span, m)}" if span.graphed else ""
            what = f"{_what(span)}{of}, {span.start_us:.1f} to {span.start_us + span.us:.1f} us"
            kind = "graph" if span.graphed else "other"
            place = f'x="{x:.2f}" y="{y + 4}" width="{width:.2f}" height="14"'
            yield f'<rect class="{kind}" {place}><title>{escaped(what)}</title></rect>'


def _axis(end_us: float, y: int) -> Iterator[str]:
    step = next(s * 10**power for power in range(9) for s in (1, 2, 5) if end_us / (s * 10**power) <= 6)
    mark = 0.0
    while mark <= end_us:
        x = _LEFT + mark / end_us * (_WIDTH - _LEFT)
        anchor = "end" if x > _WIDTH - 30 else "middle" if mark else "start"
        yield f'<line class="axis" x1="{x:.1f}" y1="0" x2="{x:.1f}" y2="{y}"/>'
        yield f'<text x="{x:.1f}" y="{y + 14}" text-anchor="{anchor}">{mark:g} us</text>'
        mark += step


def _drawing(body: str, height: float, label: str) -> str:
    drawing = f'<svg viewBox="0 0 {_WIDTH} {height:.0f}" role="img" aria-label="{escaped(label)}">{body}</svg>'
    return scrolled(drawing, "drawing")
