"""Tables of measurements, as text for a terminal of 100 columns, or as cells.

Each workload has two text tables: times, and their costs. ``x`` is upstream's latency divided by this way's, so more
than one means faster. A missing figure is a dash. A failed measurement shows its error on a separate line.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Sequence

from pygraph_trees.report.text import nbytes, table

from .measurement import REGIMES, Measurement

WIDTH = 100

Column = tuple[str, Callable[[Measurement], str]]


def text_table(measurements: Iterable[Measurement]) -> str:
    """Tables for a terminal, two per workload, with no line longer than :data:`WIDTH`."""
    groups: dict[str, list[Measurement]] = {}
    for measurement in measurements:
        groups.setdefault(measurement.workload, []).append(measurement)
    for group in groups.values():
        group.sort(key=lambda m: REGIMES.index(m.regime))
    return "\n\n".join(map(_text, groups.values()))


def cells(measurements: Sequence[Measurement]) -> list[tuple[list[str], list[list[str]]]]:
    """For one workload: head and rows of the table of times, and of the table of costs."""
    done = [m for m in measurements if m.error is None]
    found = []
    for columns in ((*_WHICH, *_TIMES, ("x", lambda m: _number(speedup(m, done), 2))), (*_WHICH, *_COSTS)):
        found.append(([head for head, _ in columns], [[show(m) for _, show in columns] for m in done]))
    return found if done else []


def speedup(measurement: Measurement, group: Iterable[Measurement], over: str = "upstream") -> float | None:
    """Latency of the way ``over`` in the same regime, divided by this one's."""
    for other in group:
        if (other.way, other.regime) == (over, measurement.regime) and other.latency_ms and measurement.latency_ms:
            return other.latency_ms / measurement.latency_ms
    return None


def _bytes(count: int | None) -> str:
    return "-" if count is None else nbytes(count)


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _significant(value: float | None) -> str:
    return "-" if value is None else "0" if value == 0 else f"{value:.2g}"


def _kernels(m: Measurement) -> str:
    return "-" if m.kernels_total is None else f"{m.kernels_graphed}/{m.kernels_total}"


_WHICH: tuple[Column, ...] = (("way", lambda m: m.way), ("inputs", lambda m: m.regime))
_TIMES: tuple[Column, ...] = (
    ("latency ms", lambda m: _number(m.latency_ms, 3)),
    ("p90 ms", lambda m: _number(m.latency_p90_ms, 3)),
    ("ms/call", lambda m: _number(m.throughput_ms, 3)),
    ("host us", lambda m: _number(m.host_us, 1)),
    ("graph ms", lambda m: _number(m.gpu_ms, 3)),
)
_COSTS: tuple[Column, ...] = (
    ("graphed", _kernels),
    ("copied", lambda m: _bytes(m.copied_bytes)),
    ("rec.", lambda m: "-" if m.recordings is None else str(m.recordings)),
    ("compile s", lambda m: _number(m.compile_s, 1)),
    ("record s", lambda m: _number(m.record_s, 2)),
    ("peak", lambda m: _bytes(m.peak_bytes)),
    ("max diff", lambda m: _significant(m.max_diff)),
)


def _text(group: Sequence[Measurement]) -> str:
    first = group[0]
    lines = [f"{first.workload}: {first.mode}, batch {first.batch}"]
    for head, rows in cells(group):
        lines += ["", table(head, rows, left=2)]
    failed = [f"{m.way}, {m.regime}: failed: {m.error}" for m in group if m.error is not None]
    if failed:
        lines += ["", *(f"  {textwrap.shorten(line, WIDTH - 2, placeholder='...')}" for line in failed)]
    return "\n".join(lines)
