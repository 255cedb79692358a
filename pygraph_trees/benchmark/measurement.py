"""The figures of one way of running a program in one regime of inputs, and tables of them.

Times are medians over rounds. A failed measurement has ``error`` set and no figures; an unavailable figure is None, and
a dash in a table. The compile time belongs to the way and appears in both regimes. Fields may be added, but never
dropped: files have them. One table has times, the other their costs.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from pygraph_trees.report.text import nbytes, table

from .inspection import Span

REGIMES = ("same", "fresh")
PLAIN_NAMES = {"upstream": "reduce-overhead", "compile": "torch.compile", "eager": "eager"}  # of ways, for readers
WIDTH = 100  # columns of a terminal

Columns = dict[str, tuple[str, str | Callable[[int], str]]]  # by head: the figure, and how it is formatted
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


@dataclass(frozen=True, slots=True)
class Measurement:
    """The figures of one way in one regime."""

    workload: str
    mode: str  # "inference" or "training"
    batch: int
    way: str
    regime: str  # "same" tensors each call, or tensors at "fresh" addresses
    latency_ms: float | None = None  # of a call, waiting for the GPU
    latency_p90_ms: float | None = None
    throughput_ms: float | None = None  # milliseconds per call without waiting between calls
    host_us: float | None = None  # until a call returns, with the GPU idle before it
    gpu_ms: float | None = None  # GPU time inside graphs in one call
    copied_bytes: int | None = None  # inputs copied into recordings in one call
    kernels_graphed: int | None = None
    kernels_total: int | None = None
    recordings: int | None = None
    compile_s: float | None = None  # the first call
    record_s: float | None = None  # extra time of the calls before the steady state
    peak_bytes: int | None = None  # of one call: parameters, inputs, temporaries, and the reserved graph pool
    max_diff: float | None = None  # largest absolute difference of outputs from eager
    error: str | None = None
    max_diff_upstream: float | None = None
    pool_bytes: int | None = None  # reserved by the graph pools of this way
    gpu_total_ms: float | None = None  # GPU time in one call, inside and outside of graphs
    ring: int | None = None  # sets of inputs used in turn
    calls: int | None = None  # calls of each protocol in one round
    samples: Mapping[str, Sequence[float]] = field(default_factory=dict)  # by figure: of all rounds; it is their median
    routes: Sequence[str] = field(default_factory=list)  # how a function's inputs are given and why, if that was chosen
    timeline: tuple[Span, ...] = ()  # of one call
    launches: tuple[str, ...] = ()  # of that call: the recording of each graph launch, if known

    def failed(self, error: str) -> Measurement:
        """The same measurement without figures, for the given reason."""
        which = self.workload, self.mode, self.batch, self.way, self.regime
        return Measurement(*which, error=error, samples=self.samples)


def text_table(measurements: Iterable[Measurement]) -> str:
    """Both tables, and a line for each failure, with no line longer than :data:`WIDTH`."""
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
        graphed = "-" if m.kernels_total is None else f"{m.kernels_graphed}/{m.kernels_total}"
        ratio = speedup(m, done)
        times.append([m.way, m.regime, *_figures(m, _TIMES), "-" if ratio is None else f"{ratio:.2f}"])
        costs.append([m.way, m.regime, graphed, *_figures(m, _COSTS)])
    heads = ["way", "inputs", *_TIMES, "x"], ["way", "inputs", "graphed", *_COSTS]
    return list(zip(heads, (times, costs), strict=True)) if done else []


def _figures(m: Measurement, columns: Columns) -> list[str]:
    given = ((getattr(m, figure), form) for figure, form in columns.values())
    return ["-" if v is None else format(v, form) if isinstance(form, str) else form(int(v)) for v, form in given]


def speedup(measurement: Measurement, group: Iterable[Measurement], over: str = "upstream") -> float | None:
    """Latency of the way ``over`` in the same regime, divided by this one's: more than one means faster."""
    others = (m.latency_ms for m in group if (m.way, m.regime) == (over, measurement.regime))
    latency_ms = next(filter(None, others), None)
    return latency_ms / measurement.latency_ms if latency_ms and measurement.latency_ms else None
