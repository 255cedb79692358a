"""Tables of the measurements of one workload, as text for a terminal of 100 columns, or as cells.

One table has times, the other their costs. ``x`` is upstream's latency divided by this way's, so more than one means
faster. A missing figure is a dash. A failed measurement shows its error on a separate line.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Sequence

from pygraph_trees.report.text import nbytes, table

from .measurement import REGIMES, Measurement

WIDTH = 100

# A column's figure, and how it is formatted.
Columns = dict[str, tuple[str, str | Callable[[int], str]]]
_TIMES: Columns = {
    "latency ms": ("latency_ms", ".3f"),
    "p90 ms": ("latency_p90_ms", ".3f"),
    "ms/call": ("throughput_ms", ".3f"),
    "host us": ("host_us", ".1f"),
    "graph ms": ("gpu_ms", ".3f"),
}
_COSTS: Columns = {
    "copied": ("copied_bytes", nbytes),
    "rec.": ("recordings", "d"),
    "compile s": ("compile_s", ".1f"),
    "record s": ("record_s", ".2f"),
    "peak": ("peak_bytes", nbytes),
    "max diff": ("max_diff", ".2g"),
}


def text_table(measurements: Iterable[Measurement]) -> str:
    """Both tables for a terminal, with no line longer than :data:`WIDTH`."""
    group = sorted(measurements, key=lambda m: REGIMES.index(m.regime))
    lines = [f"{group[0].workload}: {group[0].mode}, batch {group[0].batch}"]
    for head, rows in cells(group):
        lines += ["", table(head, rows, left=2)]
    failed = [f"{m.way}, {m.regime}: failed: {m.error}" for m in group if m.error is not None]
    if failed:
        lines += ["", *(f"  {textwrap.shorten(line, WIDTH - 2, placeholder='...')}" for line in failed)]
    return "\n".join(lines)


def cells(measurements: Sequence[Measurement]) -> list[tuple[list[str], list[list[str]]]]:
    """Head and rows of the table of times, and of the table of costs; no table if all failed."""
    done = [m for m in measurements if m.error is None]
    times, costs = [], []
    for m in done:
        which, graphed = [m.way, m.regime], f"{m.kernels_graphed}/{m.kernels_total}"
        times.append([*which, *_figures(m, _TIMES), _formatted(speedup(m, done), ".2f")])
        costs.append([*which, "-" if m.kernels_total is None else graphed, *_figures(m, _COSTS)])
    heads = ["way", "inputs", *_TIMES, "x"], ["way", "inputs", "graphed", *_COSTS]
    return list(zip(heads, (times, costs), strict=True)) if done else []


def _figures(m: Measurement, columns: Columns) -> list[str]:
    return [_formatted(getattr(m, figure), form) for figure, form in columns.values()]


def _formatted(value: float | None, form: str | Callable[[int], str]) -> str:
    return "-" if value is None else format(value, form) if isinstance(form, str) else form(int(value))


def speedup(measurement: Measurement, group: Iterable[Measurement], over: str = "upstream") -> float | None:
    """Latency of the way ``over`` in the same regime, divided by this one's."""
    for other in group:
        if (other.way, other.regime) == (over, measurement.regime) and other.latency_ms and measurement.latency_ms:
            return other.latency_ms / measurement.latency_ms
    return None
