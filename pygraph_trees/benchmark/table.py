"""Tables of measurements: text for a terminal of 100 columns, Markdown for files.

Each workload has two text tables: times, and their costs. ``x`` is upstream's latency divided by this way's, so more
than one means faster. A missing figure is a dash. A failed measurement shows its error on a separate line.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence

from pygraph_trees.report.text import markdown_table as in_markdown
from pygraph_trees.report.text import nbytes, table

from .results import REGIMES, Measurement

WIDTH = 100

Column = tuple[str, Callable[[Measurement], str]]


def text_table(measurements: Iterable[Measurement]) -> str:
    """Tables for a terminal, two per workload, with no line longer than :data:`WIDTH`."""
    return "\n\n".join(_text(name, group) for name, group in _by_workload(measurements).items())


def markdown_table(measurements: Iterable[Measurement]) -> str:
    """A summary over all workloads, then one table each."""
    groups = _by_workload(measurements)
    parts = [_summary(groups)] if groups else []
    for name, group in groups.items():
        columns = [*_columns(group, _TIMES), *_columns(group, _COSTS)[2:]]
        done = [m for m in group if m.error is None]
        shown = in_markdown(*_cells(columns, done), left=2) if done else "(no figures)"
        parts.append(f"## {name}\n\n{_title(group[0])}\n\n" + shown + _failures(group, "- "))
    return "\n\n".join(parts) + "\n"


def cells(measurements: Sequence[Measurement]) -> list[tuple[list[str], list[list[str]]]]:
    """For one workload: head and rows of the table of times, and of the table of costs."""
    done = [m for m in measurements if m.error is None]
    return [_cells(_columns(done, columns), done) for columns in (_TIMES, _COSTS) if done]


def speedup(measurement: Measurement, group: Iterable[Measurement], over: str = "upstream") -> float | None:
    """Latency of the way ``over`` in the same regime, divided by this one's."""
    for other in group:
        if (other.way, other.regime) == (over, measurement.regime) and other.latency_ms and measurement.latency_ms:
            return other.latency_ms / measurement.latency_ms
    return None


def geometric_mean(values: Sequence[float]) -> float | None:
    """The geometric mean; None without values."""
    return statistics.geometric_mean(values) if values else None


def _bytes(count: int | None) -> str:
    return "-" if count is None else nbytes(count)


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _significant(value: float | None) -> str:
    return "-" if value is None else "0" if value == 0 else f"{value:.2g}"


def _kernels(m: Measurement) -> str:
    return "-" if m.kernels_total is None else f"{m.kernels_graphed}/{m.kernels_total}"


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


def _columns(group: Sequence[Measurement], columns: Sequence[Column]) -> list[Column]:
    found: list[Column] = [("way", lambda m: m.way), ("inputs", lambda m: m.regime), *columns]
    if columns is _TIMES:
        found.append(("x", lambda m: _number(speedup(m, group), 2)))
    return found


def _by_workload(measurements: Iterable[Measurement]) -> dict[str, list[Measurement]]:
    groups: dict[str, list[Measurement]] = {}
    for measurement in measurements:
        groups.setdefault(measurement.workload, []).append(measurement)
    for group in groups.values():
        group.sort(key=lambda m: REGIMES.index(m.regime) if m.regime in REGIMES else len(REGIMES))
    return groups


def _title(measurement: Measurement) -> str:
    return f"{measurement.workload}: {measurement.mode}, batch {measurement.batch}"


def _text(name: str, group: Sequence[Measurement]) -> str:
    done = [m for m in group if m.error is None]
    parts = [_title(group[0])]
    if done:
        for columns in (_TIMES, _COSTS):
            parts += ["", table(*_cells(_columns(group, columns), done), left=2)]
    return "\n".join(parts) + _failures(group, "  ", WIDTH)


def _cells(columns: Sequence[Column], rows: Sequence[Measurement]) -> tuple[list[str], list[list[str]]]:
    """Head and rows."""
    return [head for head, _ in columns], [[show(m) for _, show in columns] for m in rows]


def _failures(group: Sequence[Measurement], lead: str, width: int | None = None) -> str:
    lines = [
        f"{lead}{m.way}, {m.regime}: failed: {' '.join(str(m.error).split())}" for m in group if m.error is not None
    ]
    if width is not None:
        lines = [line if len(line) <= width else line[: width - 3] + "..." for line in lines]
    return "".join(f"\n{line}" for line in ["", *lines]) if lines else ""


def _summary(groups: Mapping[str, Sequence[Measurement]]) -> str:
    rows = []
    for regime in REGIMES:
        ratios: list[float] = []
        for name, group in groups.items():
            found = {m.way: m for m in group if m.regime == regime}
            cells = []
            for way in ("eager", "compile", "upstream", "ours"):
                m = found.get(way)
                ratio = speedup(m, group) if m is not None else None
                if way == "ours" and ratio is not None:
                    ratios.append(ratio)
                shown = "failed" if m is not None and m.error is not None else _number(m.latency_ms if m else None, 3)
                cells.append(f"{shown} ({ratio:.2f}x)" if ratio is not None and way != "upstream" else shown)
            rows.append([name, regime, *cells])
        mean = geometric_mean(ratios)
        if mean is not None:
            rows.append(["geometric mean", regime, "", "", "", f"{mean:.3f}x"])
    lead = "Latency in ms and, in brackets, how many times as fast as upstream's CUDA graphs."
    return f"{lead}\n\n{in_markdown(('workload', 'inputs', 'eager', 'compile', 'upstream', 'ours'), rows, left=2)}"
