"""All result files together: each workload from the latest file that has it, of one GPU and one torch."""

from __future__ import annotations

import dataclasses
import json
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pygraph_trees.benchmark import Measurement

from . import paper
from .result_files import Results

_OTHERS = ("compile", "upstream")


@dataclass(frozen=True)
class Workload:
    """The measurements of a workload in one run."""

    name: str
    mode: str
    batch: int
    by_way: Mapping[tuple[str, str], Measurement]  # by way and regime, without failed ones
    errors: Mapping[tuple[str, str], str]

    def get(self, way: str, regime: str, figure: str) -> float | None:
        found = self.by_way.get((way, regime))
        return None if found is None else getattr(found, figure)

    def ratio(self, figure: str, regime: str) -> float | None:
        """The ratio of upstream's figure to ours, for figures that are better if lower."""
        ours, upstream = (self.get(way, regime, figure) for way in ("ours", "upstream"))
        return upstream / ours if ours and upstream else None

    def ratio_to_best(self, figure: str, regime: str) -> float | None:
        """The ratio of the better figure of upstream's graphs and no graphs to ours, if all three were measured."""
        ours, best = self.get("ours", regime, figure), self.best_other(figure, regime)
        return best[1] / ours if ours and best and all(self.get(way, regime, figure) for way in _OTHERS) else None

    def limit(self, way: str, regime: str) -> float | None:
        """The ratio of latency to the GPU's time inside graphs, which is the least possible latency."""
        latency, inside = (self.get(way, regime, figure) for figure in ("latency_ms", "gpu_ms"))
        return latency / inside if latency and inside else None

    def best_other(self, figure: str, regime: str) -> tuple[str, float] | None:
        """The better one of upstream's graphs and no graphs, among those that were measured."""
        known = [(way, value) for way in _OTHERS if (value := self.get(way, regime, figure))]
        return min(known, key=operator.itemgetter(1), default=None)


Ratio = Callable[[Workload, str, str], "float | None"]


@dataclass(frozen=True)
class Summary:
    """All workloads of one GPU and one torch."""

    files: Mapping[Path, Results]
    left_out: Sequence[Path]  # of another GPU or torch
    workloads: Sequence[Workload]  # in the order of the list
    source: Mapping[str, Path]  # by workload
    missing: Sequence[str]  # workloads that were not measured
    starts: Mapping[Path, tuple[Results, Sequence[str]]]  # files of times to compile and record, and their workloads

    def ratios(self, figure: str, regime: str, of: Ratio = Workload.ratio) -> list[float]:
        """The ratios to upstream, or others ``of`` a workload, for workloads on the paper's list."""
        listed = (w for w in self.workloads if w.name not in paper.BESIDES)
        return [ratio for w in listed if (ratio := of(w, figure, regime)) is not None]


def read_all(paths: Iterable[Path]) -> dict[Path, Results]:
    """The result files among these, without files of other figures; ResultsFormatError if one is neither."""
    found = {}
    for path in sorted(paths):
        try:
            body = json.loads(path.read_text(encoding="utf-8"))
        except ValueError:
            body = None  # its reader reports the error
        if not (isinstance(body, dict) and "results" in body):
            found[path] = Results.read(path)
    return found


def summarise(
    files: Mapping[Path, Results], names: Sequence[str], starts: Mapping[Path, Results] | None = None
) -> Summary:
    """Takes each workload from the latest file that has it; ``names`` lists all in order. ValueError without a file.

    ``starts``: files of the same torch, preferably of the same GPU, for times to compile and record that are missing.
    """
    if not files:
        raise ValueError("there is no result file")
    by_date = sorted(files.items(), key=lambda item: item[1].date)
    latest = by_date[-1][1]
    same = {path: r for path, r in by_date if (r.gpu, r.torch) == (latest.gpu, latest.torch)}
    source = {m.workload: path for path, results in same.items() for m in results.records}
    started = [(path, r) for path, r in (starts or {}).items() if r.torch == latest.torch]
    started.sort(key=lambda item: item[1].gpu == latest.gpu)  # later files take precedence
    start_of = {m.workload: path for path, r in started for m in r.records if m.error is None}
    times = {
        (m.workload, m.way, m.regime): m
        for path, r in started
        for m in r.records
        if m.error is None and start_of[m.workload] == path
    }
    order = [*(n for n in names if n in source), *(n for n in source if n not in names)]
    workloads, untimed = [], []
    for name in order:
        found = [m for m in same[source[name]].records if m.workload == name]
        untimed += [name] if any(m.compile_s is None for m in found) else []
        workloads.append(
            Workload(
                name,
                found[0].mode,
                found[0].batch,
                {(m.way, m.regime): _started(m, times) for m in found if m.error is None},
                {(m.way, m.regime): m.error for m in found if m.error is not None},
            )
        )
    used = {path: results for path, results in same.items() if path in source.values()}
    left_out, missing = [path for path in files if path not in same], [n for n in names if n not in source]
    timed = {path: (r, [name for name in untimed if start_of.get(name) == path]) for path, r in reversed(started)}
    return Summary(used, left_out, workloads, source, missing, {path: what for path, what in timed.items() if what[1]})


def _started(measured: Measurement, times: Mapping[tuple[str, str, str], Measurement]) -> Measurement:
    """A measurement, with times to compile and record from another one if it has none."""
    other = times.get((measured.workload, measured.way, measured.regime))
    if measured.compile_s is not None or other is None:
        return measured
    return dataclasses.replace(measured, compile_s=other.compile_s, record_s=other.record_s)


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Columns as a Markdown table, the first one left-aligned and the others right-aligned."""
    ruler = ["---"] + ["---:"] * (len(head) - 1)
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, ruler, *rows))
