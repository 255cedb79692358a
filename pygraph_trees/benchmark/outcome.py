"""The figures of a comparison by way and regime of inputs, and the outcome made of them: tables, verdicts, a page.

Times are medians over rounds. A failed measurement has ``error`` set and no figures; an unavailable figure is None.
Fields may be added, but never dropped: files that ``compare --json`` wrote have them.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field

from pygraph_trees.errors import PygraphError
from pygraph_trees.report.markup import Section, Shown, render
from pygraph_trees.report.page import page
from pygraph_trees.report.summary import Report
from pygraph_trees.report.text import nbytes, table

from .inspection import Span

REGIMES = ("same", "fresh")
PLAIN_NAMES = {"upstream": "reduce-overhead", "compile": "torch.compile", "eager": "eager"}  # of ways, for readers
WIDTH = 100  # columns of a terminal
_MOST_NAMES = 4  # recordings named per span
_KINDS = {"host": ("other calls of CUDA", "launch of a graph"), "gpu": ("other work", "work of a graph")}  # by lane

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
    lines += ["", *(f"  {textwrap.shorten(line, WIDTH - 2, placeholder='...')}" for line in failed)] if failed else []
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


class NeedsGpu(PygraphError):
    template = "compare needs a GPU, and torch finds none; {instead}"


@dataclass(frozen=True, slots=True)
class Outcome(Shown):
    """What a comparison found: as text, JSON with these keys, or a page."""

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
    return PLAIN_NAMES.get(way, way)


def _timeline(timed: Sequence[Measurement]) -> Section:
    shown = [m for m in timed if m.regime == "fresh"] or timed
    # Ways without graphs are often far slower, and would make the others narrow.
    scaled = [m for m in shown if any(span.graphed for span in m.timeline)] or shown
    end_us = max(span.end_us for m in scaled for span in m.timeline)
    step_us = next(s * 10**power for power in range(9) for s in (1, 2, 5) if end_us / (s * 10**power) <= 6)
    body = render("timeline", shown=shown, end_us=end_us, step_us=step_us, name=_name, kinds=_KINDS, of=_of)
    return Section("timeline", "A call in time", body)


def _of(span: Span, m: Measurement) -> str:
    """The recordings whose launch or work a span shows; without names, the numbers of the call's launches."""
    if span.launches is None:
        return "not known" if span.graphed else "-"
    first, last = span.launches
    if names := m.launches[first : last + 1]:
        return "; ".join(names if len(names) <= _MOST_NAMES else [*names[:_MOST_NAMES], f"{len(names)} in all"])
    return f"launch {first + 1}" if first == last else f"launches {first + 1} to {last + 1}"
