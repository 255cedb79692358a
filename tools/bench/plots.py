"""Draws the plots of a summary: SVG, light and dark.

:func:`draw` takes a :class:`Summary` and a folder, and returns the names that the files begin with. It needs
matplotlib, which nothing else here does, and exits with a message without it.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pygraph_trees.report.text import nbytes

from .collected import Summary, Workload, geometric_mean
from .paper import GEOMETRIC_MEAN


@dataclass(frozen=True)
class Colours:
    ground: str
    text: str
    faint: str  # of the grid
    first: str  # same inputs, ours
    second: str  # fresh inputs
    other: str  # upstream


THEMES = {
    "light": Colours("#ffffff", "#24292f", "#d8dee4", "#0969da", "#1a7f64", "#8c959f"),
    "dark": Colours("#0d1117", "#e6edf3", "#30363d", "#58a6ff", "#3fb996", "#8b949e"),
}
_ROW = 0.36  # inches per workload
_WIDTH = 8.0


def draw(summary: Summary, folder: Path) -> list[str]:
    """Writes all plots to a folder; returns the names that the files begin with.

    Raises:
        SystemExit: matplotlib is not installed.
    """
    try:
        matplotlib = importlib.import_module("matplotlib")
    except ImportError:
        raise SystemExit("plots need matplotlib: install it, or take --no-plots") from None
    matplotlib.use("Agg")
    pyplot = importlib.import_module("matplotlib.pyplot")
    folder.mkdir(parents=True, exist_ok=True)
    for name, make in _PLOTS.items():
        for theme, colours in THEMES.items():
            # Text stays text, and the files do not depend on the time of their creation.
            with pyplot.rc_context({**_settings(colours), "svg.fonttype": "none", "svg.hashsalt": name}):
                figure = make(pyplot, summary, colours)
                figure.savefig(folder / f"{name}-{theme}.svg", metadata={"Date": None}, bbox_inches="tight")
                pyplot.close(figure)
    return list(_PLOTS)


def _settings(colours: Colours) -> dict[str, Any]:
    return {
        "figure.facecolor": colours.ground,
        "savefig.facecolor": colours.ground,
        "axes.facecolor": colours.ground,
        "axes.edgecolor": colours.faint,
        "axes.labelcolor": colours.text,
        "axes.titlecolor": colours.text,
        "text.color": colours.text,
        "xtick.color": colours.text,
        "ytick.color": colours.text,
        "grid.color": colours.faint,
        "font.size": 9.5,
        "font.family": "sans-serif",
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.spines.left": False,
        "axes.axisbelow": True,
        "legend.frameon": False,
    }


def _axes(pyplot: Any, names: Sequence[str], title: str, label: str) -> tuple[Any, Any]:
    figure, axes = pyplot.subplots(figsize=(_WIDTH, 1.1 + _ROW * len(names)))
    axes.set_title(title, loc="left", fontsize=11, pad=22)
    axes.set_xlabel(label)
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", linewidth=0.7)
    return figure, axes


def _legend(axes: Any) -> None:
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=4, borderaxespad=0, handletextpad=0.5, columnspacing=1.4)


def _speedup(pyplot: Any, summary: Summary, colours: Colours) -> Any:
    both = {w.name: [w.ratio("latency_ms", regime) for regime in ("same", "fresh")] for w in summary.workloads}
    rounds = {w.name: [w.rounds("latency_ms", regime) for regime in ("same", "fresh")] for w in summary.workloads}
    rows = sorted(((n, r) for n, r in both.items() if any(r)), key=lambda row: -(row[1][0] or row[1][1] or 0))
    mean = [geometric_mean(summary.ratios("latency_ms", regime)) for regime in ("same", "fresh")]
    rows.append((f"geometric mean of {len(summary.ratios('latency_ms', 'fresh'))}", mean))
    figure, axes = _axes(
        pyplot,
        [name for name, _ in rows],
        "How many times as fast as upstream's CUDA graphs",
        "latency, upstream / ours; lines span the rounds "
        f"(the paper's mean: {GEOMETRIC_MEAN}x, on other hardware and another PyTorch)",
    )
    for number, (regime, colour) in enumerate((("same", colours.first), ("fresh", colours.second))):
        places = [row - 0.19 + 0.38 * number for row in range(len(rows))]
        values = [ratios[number] or 0 for _, ratios in rows]
        axes.barh(places, values, height=0.34, color=colour, label=f"{regime} inputs")
        for place, value, (name, _) in zip(places, values, rows, strict=True):
            spread = rounds.get(name, ([], []))[number]
            if len(spread) > 1:
                axes.plot([min(spread), max(spread)], [place] * 2, color=colours.text, linewidth=1.2)
            if value:
                axes.text(max([value, *spread]) + 0.01, place, f"{value:.2f}", va="center", fontsize=7.5)
    axes.axvline(1, color=colours.text, linewidth=1)
    axes.axhline(len(rows) - 1.5, color=colours.faint, linewidth=0.8)
    longest = [value or 0 for _, ratios in rows for value in ratios]
    longest += [value for each in rounds.values() for spread in each for value in spread]
    axes.set_xlim(0, max(longest) * 1.08)
    _legend(axes)
    return figure


@dataclass(frozen=True)
class _Pair:
    """A plot of upstream's figure and ours, with a line per workload.

    With ``least``, the scale is logarithmic and smaller values are shown at ``least``; otherwise it begins at 1.
    """

    value: Callable[[Workload, str], float | None]  # of a way
    show: Callable[[float], str]
    title: str
    label: str
    least: float | None = None


def _draw_pair(pair: _Pair, pyplot: Any, summary: Summary, colours: Colours) -> Any:
    show, least = pair.show, pair.least
    found = [(w.name, *(pair.value(w, way) for way in ("upstream", "ours"))) for w in summary.workloads]
    rows = sorted(((n, u, o) for n, u, o in found if u is not None and o is not None), key=lambda row: -row[1])
    figure, axes = _axes(pyplot, [name for name, _, _ in rows], pair.title, pair.label)
    floor = 0.0 if least is None else least
    if least is not None:
        axes.set_xscale("log")
        axes.xaxis.set_minor_formatter(lambda x, _: "")
    axes.xaxis.set_major_formatter(lambda x, _: show(x) if x > floor else show(0))
    for row, (_, upstream, ours) in enumerate(rows):
        ends = sorted([upstream, ours])
        axes.plot([max(end, floor) for end in ends], [row] * 2, color=colours.faint, linewidth=2.5, zorder=1)
        for end, side in zip(ends, (-1, 1), strict=True):
            place, align = (max(end, floor), row), "right" if side < 0 else "left"
            style = {"textcoords": "offset points", "va": "center", "ha": align, "fontsize": 7.5}
            around = {"facecolor": colours.ground, "edgecolor": "none", "pad": 0.8}
            axes.annotate(show(end), place, (7 * side, 0), bbox=around, **style)
    for number, (label, colour) in enumerate((("upstream", colours.other), ("ours", colours.first)), 1):
        points = [max(row[number], floor) for row in rows]
        axes.scatter(points, range(len(rows)), s=42, color=colour, label=label, zorder=2)
    low, high = axes.get_xlim()
    if least is None:
        axes.axvline(1, color=colours.text, linewidth=1)
        axes.set_xlim(1 - 0.12 * (high - 1), high + 0.05 * (high - 1))
    else:
        axes.set_xlim(low / (high / low) ** 0.08, high * (high / low) ** 0.08)
    _legend(axes)
    return figure


def _time(us: float) -> str:
    return f"{us:.0f} µs" if us < 1000 else f"{us / 1000:.1f} ms"


_PAIRS = {
    "host-time": _Pair(
        lambda w, way: w.get(way, "fresh", "host_us"),
        _time,
        "What a call costs the host",
        "until a call returns, fresh inputs",
        least=1.0,
    ),
    "bytes-copied": _Pair(
        lambda w, way: w.get(way, "fresh", "copied_bytes"),
        lambda count: nbytes(int(count)) if count >= 1 else "0",
        "What each replay copies",
        "bytes of inputs, fresh ones",
        least=100.0,
    ),
    "distance-to-the-limit": _Pair(
        lambda w, way: w.limit(way, "fresh"),
        lambda times: f"{times:.2f}x",
        "How far from the limit",
        "latency by the GPU's time inside of graphs, fresh inputs",
    ),
}
_PLOTS: Mapping[str, Callable[[Any, Summary, Colours], Any]] = {
    "speedup": _speedup,
    **{name: functools.partial(_draw_pair, pair) for name, pair in _PAIRS.items()},
}
