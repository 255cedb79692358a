"""One page and plots of all that ``python tools/bench`` measured.

usage: python tools/bench/summary.py [FILE ...] [--out DIR] [--no-plots]

Reads result files (by default all of ``tools/bench/results``), takes each workload from the latest one, and writes
README.md and plots/*.svg and *.png there, light and dark. Files of another GPU or torch than the latest are left out,
and said to be. What is slower, copied, larger or different comes first. Where the files are those of
``tools/bench/results``, the table in the project's own README.md is written anew too. Plots need matplotlib.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

sys.path[:0] = [str(Path(__file__).resolve().parents[n]) for n in (2, 1)]

from bench import paper
from bench.command_line import RESULTS_FOLDER
from bench.loading import WORKLOADS_FOLDER, load_workloads
from pygraph_trees.comparison import WAYS, Results
from pygraph_trees.comparison.results import REGIMES, ResultsFormatError
from pygraph_trees.comparison.table import geometric_mean
from pygraph_trees.coverage.text import nbytes

if TYPE_CHECKING:
    from pygraph_trees.comparison import Measurement

SLOWER = 1.02  # than the better of upstream's graphs and no graphs
LONGER = 1.15  # to compile and record, than upstream
LARGER_NBYTES = 4 << 20  # than upstream's memory
README = Path(__file__).resolve().parents[2] / "README.md"
_NAMES = {"eager": "eager", "compile": "no graphs", "upstream": "upstream", "ours": "ours"}


@dataclass(frozen=True)
class Workload:
    """What one run measured of a workload."""

    name: str
    mode: str
    batch: int
    by_way: Mapping[tuple[str, str], Measurement]  # by way and regime, those that did not fail
    errors: Mapping[tuple[str, str], str]

    def get(self, way: str, regime: str, figure: str) -> float | None:
        found = self.by_way.get((way, regime))
        return None if found is None else getattr(found, figure)

    def ratio(self, figure: str, regime: str) -> float | None:
        """Upstream's figure by ours, of those of which less is better."""
        ours, upstream = (self.get(way, regime, figure) for way in ("ours", "upstream"))
        return upstream / ours if ours and upstream else None

    def limit(self, way: str, regime: str) -> float | None:
        """Latency by the GPU's time inside of graphs, which is the least that it can be."""
        latency, inside = (self.get(way, regime, figure) for figure in ("latency_ms", "gpu_ms"))
        return latency / inside if latency and inside else None

    def best_other(self, figure: str, regime: str) -> tuple[str, float] | None:
        """The better one of upstream's graphs and no graphs, of those that were measured."""
        found = [(self.get(way, regime, figure), way) for way in ("upstream", "compile")]
        known = [(value, way) for value, way in found if value]
        return (min(known)[1], min(known)[0]) if known else None


@dataclass(frozen=True)
class Summary:
    """All workloads of one GPU and one torch."""

    files: Mapping[Path, Results]
    left_out: Sequence[Path]  # of another GPU or torch
    workloads: Sequence[Workload]  # in the order of the list
    source: Mapping[str, Path]  # by workload
    missing: Sequence[str]  # workloads that were not measured

    def ratios(self, figure: str, regime: str) -> list[float]:
        return [ratio for w in self.workloads if (ratio := w.ratio(figure, regime)) is not None]


def read_all(paths: Iterable[Path]) -> dict[Path, Results]:
    """The result files among these; files of other figures, which have "results" and no "records", are passed over.

    Raises:
        ResultsFormatError: a file is neither.
    """
    found = {}
    for path in sorted(paths):
        try:
            body = json.loads(path.read_text(encoding="utf-8"))
        except ValueError:
            body = None  # let its reader say what is wrong
        if not (isinstance(body, dict) and "results" in body):
            found[path] = Results.read(path)
    return found


def summarise(files: Mapping[Path, Results], names: Sequence[str]) -> Summary:
    """Takes each workload from the latest file that has it; ``names`` are all that there are, in order.

    Raises:
        ValueError: there is no file.
    """
    if not files:
        raise ValueError("there is no result file")
    by_date = sorted(files.items(), key=lambda item: item[1].date)
    latest = by_date[-1][1]
    same = {path: r for path, r in by_date if (r.gpu, r.torch) == (latest.gpu, latest.torch)}
    source = {m.workload: path for path, results in same.items() for m in results.records}
    order = [*(n for n in names if n in source), *(n for n in source if n not in names)]
    workloads = []
    for name in order:
        found = [m for m in same[source[name]].records if m.workload == name]
        workloads.append(
            Workload(
                name,
                found[0].mode,
                found[0].batch,
                {(m.way, m.regime): m for m in found if m.error is None},
                {(m.way, m.regime): m.error for m in found if m.error is not None},
            )
        )
    used = {path: results for path, results in same.items() if path in source.values()}
    return Summary(
        used, [path for path in files if path not in same], workloads, source, [n for n in names if n not in source]
    )


# -- what to look at first


def regressions(summary: Summary) -> Iterator[str]:
    """What is worse than upstream or than no graphs, or different, a line each."""
    for w in summary.workloads:
        for (way, regime), error in w.errors.items():
            yield f"**{w.name}**, {_NAMES[way]}, {regime} inputs: failed: {' '.join(error.split())}"
    untold = [w.name for w in summary.workloads if not any(w.get("compile", r, "latency_ms") for r in REGIMES)]
    if untold:
        yield f"without a figure of no graphs, so compared with upstream alone: {', '.join(untold)}"
    for figure, what in (("latency_ms", "latency"), ("throughput_ms", "time a call without waits")):
        for w in summary.workloads:
            for regime in REGIMES:
                ours, best = w.get("ours", regime, figure), w.best_other(figure, regime)
                if ours and best and ours > SLOWER * best[1]:
                    yield (
                        f"**{w.name}**, {regime} inputs: {what} {ours:.3f} ms, {_NAMES[best[0]]} {best[1]:.3f} "
                        f"({ours / best[1]:.2f} times as long)"
                    )
    for w in summary.workloads:
        copied = w.get("ours", "fresh", "copied_bytes") or w.get("ours", "same", "copied_bytes")
        if copied:
            yield f"**{w.name}**: {nbytes(int(copied))} copied at each replay"
    for w in summary.workloads:
        ours, upstream = (w.get(way, "same", "peak_bytes") for way in ("ours", "upstream"))
        if ours and upstream and ours > upstream + LARGER_NBYTES:
            yield f"**{w.name}**: {nbytes(int(ours))} of GPU memory at a call's peak, upstream {nbytes(int(upstream))}"
    for w in summary.workloads:
        ours, upstream = (_to_start(w, way) for way in ("ours", "upstream"))
        if ours and upstream and ours > LONGER * upstream:
            yield f"**{w.name}**: {ours:.1f} s to compile and record, upstream {upstream:.1f}"
    for w in summary.workloads:
        apart = max(w.get("ours", regime, "max_diff_upstream") or 0 for regime in REGIMES)
        own = max(w.get("upstream", regime, "max_diff_upstream") or 0 for regime in REGIMES)
        if apart:
            also = f"; two runs of upstream's: {own:.2g}" if own else ""
            yield f"**{w.name}**: outputs differ from upstream's by at most {apart:.2g}{also}"


def _to_start(w: Workload, way: str) -> float | None:
    compiling, recording = w.get(way, "same", "compile_s"), w.get(way, "same", "record_s")
    return None if compiling is None else compiling + (recording or 0)


# -- tables


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}" if value < 10 else f"{value:.2f}"


def _times(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}x"


def _us(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}"


def _bytes(value: float | None) -> str:
    return "-" if value is None else nbytes(int(value))


def _pair(w: Workload, regime: str, figure: str, show: Callable[[float | None], str]) -> str:
    return " → ".join(show(w.get(way, regime, figure)) for way in ("upstream", "ours"))


def _graphed(w: Workload, way: str) -> str:
    graphed, total = (w.get(way, "same", f"kernels_{which}") for which in ("graphed", "total"))
    return "-" if total is None else f"{graphed:.0f}/{total:.0f}"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _latency_table(summary: Summary, figure: str, regime: str) -> str:
    ways = [way for way in WAYS if any(w.get(way, regime, figure) for w in summary.workloads)]
    rows = [
        [w.name, *(_ms(w.get(way, regime, figure)) for way in ways), _times(w.ratio(figure, regime))]
        for w in summary.workloads
    ]
    mean = geometric_mean(summary.ratios(figure, regime))
    rows.append([f"geometric mean of {len(summary.ratios(figure, regime))}", *[""] * len(ways), _times(mean)])
    return _table(["workload", *(_NAMES[way] for way in ways), "over upstream"], rows)


def page(summary: Summary, plots: Sequence[str] = ()) -> str:
    """The page, in Markdown. ``plots``: names of those that were drawn."""
    latest = max(summary.files.values(), key=lambda r: r.date)
    parts = [
        f"# Benchmarks: {latest.gpu}, torch {latest.torch}",
        'Made by `python tools/bench/summary.py`. *Upstream* is `mode="reduce-overhead"`, *no graphs* is '
        "`torch.compile` alone. *Same* inputs are the same tensors at each call, *fresh* ones lie elsewhere than at "
        "the call before. Medians of rounds in which all ways took turns.",
        "\n".join(_described(summary)),
        "## Worse than upstream or no graphs, or different",
        "\n".join(f"- {line}" for line in regressions(summary)) or "Nothing.",
    ]
    if summary.missing:
        parts += ["## Not measured", ", ".join(summary.missing) + "."]
    for name in plots:
        parts.append(_picture(name))
    parts += ["## Latency, ms", "With a wait for the GPU at each call."]
    for regime in REGIMES:
        parts += [f"### {regime.capitalize()} inputs", _latency_table(summary, "latency_ms", regime)]
    parts += ["## Time a call without waits, ms"]
    for regime in REGIMES:
        parts += [f"### {regime.capitalize()} inputs", _latency_table(summary, "throughput_ms", regime)]
    parts += [
        "## What it is made of",
        "Upstream → ours. *Host* is until a call returns, µs; *graphs* the GPU's time inside of CUDA graphs, ms, which "
        "is the least that latency can be: *limit* is how many times as long it is. *Copied* are inputs, at each "
        "replay, *kernels* those inside of graphs of all.",
        _table(
            ["workload", "mode", "batch", "host, same", "host, fresh", "graphs", "limit", "copied", "kernels"],
            (
                [
                    *(w.name, w.mode, str(w.batch)),
                    *(_pair(w, regime, "host_us", _us) for regime in REGIMES),
                    _pair(w, "fresh", "gpu_ms", _ms),
                    " → ".join(_times(w.limit(way, "fresh")) for way in ("upstream", "ours")),
                    _pair(w, "fresh", "copied_bytes", _bytes),
                    " → ".join(_graphed(w, way) for way in ("upstream", "ours")),
                ]
                for w in summary.workloads
            ),
        ),
        "## What it costs",
        "Upstream → ours. *Memory* is a call's peak on the GPU: parameters, inputs, temporaries, and the pool as "
        "reserved. *Compile* and *record* are s, once each; upstream compiles first and fills what both use.",
        _table(
            ["workload", "memory", "compile", "record", "recordings"],
            (
                [
                    w.name,
                    _pair(w, "same", "peak_bytes", _bytes),
                    _pair(w, "same", "compile_s", lambda v: "-" if v is None else f"{v:.1f}"),
                    _pair(w, "same", "record_s", lambda v: "-" if v is None else f"{v:.3f}"),
                    _pair(w, "same", "recordings", lambda v: "-" if v is None else f"{v:.0f}"),
                ]
                for w in summary.workloads
            ),
        ),
        "## Beside the paper",
        f"PyGraph (arXiv 2503.19779), on an H100 and over a PyTorch of April 2024: geometric mean "
        f"{paper.GEOMETRIC_MEAN}x. Ours in latency, same and fresh inputs.",
        _table(
            ["workload", "ours, same", "ours, fresh", "the paper"],
            (
                [
                    w.name,
                    *(_times(w.ratio("latency_ms", regime)) for regime in REGIMES),
                    paper.FIGURES.get(w.name, "-"),
                ]
                for w in summary.workloads
            ),
        ),
    ]
    return "\n\n".join(parts) + "\n"


BEGIN, END = "<!-- benchmarks: generated by tools/bench/summary.py -->", "<!-- end of the benchmarks -->"


def short_table(summary: Summary) -> str:
    """The table of the project's README, where upstream was measured too; a mean where there are several."""
    measured = [w for w in summary.workloads if any(w.ratio("latency_ms", regime) for regime in REGIMES)]
    rows = [
        [
            f"{w.name}, {w.mode}",
            *(
                cell
                for regime in REGIMES
                for cell in (_pair(w, regime, "latency_ms", _ms), _times(w.ratio("latency_ms", regime)))
            ),
            *(_pair(w, regime, "host_us", _us) for regime in REGIMES),
            _pair(w, "fresh", "copied_bytes", _bytes),
        ]
        for w in measured
    ]
    means = [_times(geometric_mean(summary.ratios("latency_ms", regime))) for regime in REGIMES]
    rows.append([f"geometric mean of {len(measured)}", "", means[0], "", means[1], "", "", ""])
    head = ["workload", "latency, same inputs", "", "latency, fresh inputs", "", "host, same", "host, fresh", "copied"]
    return _table(head, rows)


def with_table(text: str, table: str) -> str:
    """A README with another table between its two marks. Raises :class:`ValueError` where it lacks them."""
    before, found, rest = text.partition(BEGIN)
    _, ended, behind = rest.partition(END)
    if not (found and ended):
        raise ValueError(f"README.md has no lines {BEGIN} and {END}")
    return f"{before}{BEGIN}\n{table}\n{END}{behind}"


def _described(summary: Summary) -> Iterator[str]:
    for path, results in summary.files.items():
        of = ", ".join(name for name, source in summary.source.items() if source == path)
        yield (
            f"- [{path.name}]({path.name}): {results.date[:10]}, {results.rounds} rounds, driver {results.driver}, "
            f"triton {results.triton}, code {results.code_hash[:12]}: {of}"
        )
    for path in summary.left_out:
        yield f"- {path.name} is of another GPU or torch and left out"


def _picture(name: str) -> str:
    return (
        f'<picture><source media="(prefers-color-scheme: dark)" srcset="plots/{name}-dark.svg">'
        f'<img alt="{name.replace("-", " ")}" src="plots/{name}-light.svg"></picture>'
    )


def main(arguments: Sequence[str]) -> int:
    parse = argparse.ArgumentParser(prog="python tools/bench/summary.py", description=__doc__.partition("\n")[0])
    parse.add_argument("files", nargs="*", type=Path, metavar="FILE", help="result files (all of tools/bench/results)")
    parse.add_argument("--out", type=Path, default=RESULTS_FOLDER, metavar="DIR", help="where to write")
    parse.add_argument("--no-plots", action="store_true", help="write the page alone")
    options = parse.parse_args(arguments)
    try:
        files = read_all(options.files or RESULTS_FOLDER.glob("*.json"))
    except (OSError, ResultsFormatError) as error:
        parse.error(str(error))
    if not files:
        parse.error("there is no result file")
    summary = summarise(files, list(load_workloads(WORKLOADS_FOLDER)))
    plots: list[str] = []
    options.out.mkdir(parents=True, exist_ok=True)
    if not options.no_plots:
        from bench.plots import draw

        plots = draw(summary, options.out / "plots")
    (options.out / "README.md").write_text(page(summary, plots), encoding="utf-8")
    print(options.out / "README.md")
    if not options.files and options.out == RESULTS_FOLDER:
        README.write_text(with_table(README.read_text(encoding="utf-8"), short_table(summary)), encoding="utf-8")
        print(README)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
