"""Tables of the training loops' results, for the script's output, the page of results and the README.

A result is a dictionary that ``training_loops.py`` writes for one model, way and loop. In a table's cell, the time with
a wait after each step comes first, then the time without waits.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from bench import loops, trained_models
from bench.collected import markdown_table
from pygraph_trees.report.text import nbytes

PATTERN = "*-training-loops*.json"
# A larger distance, relative to eager's gradients and to the distance without graphs, is not due to rounding.
APART, TIMES_AS_FAR = 0.02, 3
_NAMES = {
    "eager": "eager",
    "captured": "captured by the program",
    "upstream": "upstream",
    "compile": "no graphs",
    "ours": "ours",
    "ours-upstream": "ours, outputs as upstream's",
}
Result = dict[str, Any]


def latest(folder: Path, gpu: str, torch: str) -> list[Result]:
    """The files' contents for a torch version: for each number of ranks the latest, of this GPU if it has one."""
    files = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob(PATTERN))]
    files.sort(key=lambda found: (found["gpu"] == gpu, found["date"]))
    by_ranks = {found.get("ranks", 0): found for found in files if found["torch"] == torch}
    return [found for _, found in sorted(by_ranks.items())]


def table(results: Sequence[Result]) -> str:
    """For each model, a table of times and one of a step's work; then the problems."""
    parts = []
    for model in dict.fromkeys(found["model"] for found in results):
        of_model = [found for found in results if found["model"] == model]
        parts += [f"### {trained_models.TITLES[model]}", _times(of_model), _work(of_model)]
    wrong = "\n".join(f"- {line}" for line in problems(results))
    return "\n\n".join([*parts, *([wrong] if wrong else [])])


def section(figures: Result) -> str:
    """The section for one file, on the page of results."""
    ranks = figures.get("ranks", 0)
    return "\n\n".join(
        [
            f"## Training loops{f', DistributedDataParallel, ranks: {ranks}' if ranks else ''}",
            f"`training_loops.py`, {figures['date']}, {figures['gpu']}, torch {figures['torch']}, at most "
            f"{figures['rounds']} rounds, code {figures['code_hash'][:12]}. Times are µs per step, with a wait after "
            "each step / without waits. *Host* is the time until a forward or a backward returns, in steps with waits. "
            "*Allocations* are torch's, per step. *Memory* is a turn's peak, allocated / reserved. Loop G has clones "
            "and marks with upstream, and with outputs as upstream's.",
            table(figures["results"]),
        ]
    )


def readme_row(files: Sequence[Result]) -> dict[str, Any] | None:
    """Geometric means of µs per step and host µs, by way, over BERT's loops without ranks that all three ways ran."""
    results = [one for figures in files if not figures.get("ranks") for one in figures["results"]]
    found = {(one["way"], one["loop"]): one for one in results if one["model"] == "bert"}
    ways = ("compile", "upstream", "ours")
    ran = [loop for loop in loops.LOOPS if all("done_us" in found.get((way, loop), {}) for way in ways)]
    if not ran:
        return None
    times, host = (
        {way: geometric_mean(found[way, loop][figure] for loop in ran) for way in ways}
        for figure in ("done_us", "host_us")
    )
    return {"loops": len(ran), "done_us": times, "host_us": host}


def problems(results: Sequence[Result]) -> Iterator[str]:
    """A line for each failure, and for each value that differs from eager's."""
    failed: dict[tuple[str, str, str], list[str]] = {}
    for found in results:
        if "error" in found:
            error = " ".join(found["error"].split())[:300]
            failed.setdefault((found["model"], found["way"], error), []).append(found["loop"])
    for (model, way, error), which in failed.items():
        yield f"**{model}**, {', '.join(which)}, {_NAMES[way]}: failed: {error}"
    plain = {(one["model"], one["loop"]): one.get("apart", 0.0) for one in results if one["way"] == "compile"}
    for found in results:
        where = f"**{found['model']}**, {found['loop']}, {_NAMES[found['way']]}"
        if found.get("apart", 0.0) > max(APART, TIMES_AS_FAR * plain.get((found["model"], found["loop"]), 0.0)):
            yield f"{where}: gradients differ from eager's by {found['apart']:.1%} of their norm"
        if found.get("kept_losses"):
            yield f"{where}: losses read later: {found['kept_losses']}"


def _by_loop(results: Sequence[Result]) -> Iterator[tuple[str, dict[str, Result]]]:
    for loop in dict.fromkeys(found["loop"] for found in results):
        yield f"{loop} {loops.TITLES[loop]}", {found["way"]: found for found in results if found["loop"] == loop}


def _times(results: Sequence[Result]) -> str:
    ways = list(dict.fromkeys(found["way"] for found in results))
    ratios = [way for way in ways if way != "ours"] if "ours" in ways else []
    rows = [
        [
            loop,
            *(_cell(by_way.get(way)) for way in ways),
            *(_ratio(by_way.get(way), by_way.get("ours")) for way in ratios),
        ]
        for loop, by_way in _by_loop(results)
    ]
    return markdown_table(["loop", *(_NAMES[way] for way in ways), *(f"{_NAMES[way]} / ours" for way in ratios)], rows)


def _cell(found: Result | None) -> str:
    return "-" if found is None or "done_us" not in found else f"{found['done_us']:.0f} / {found['step_us']:.0f}"


def _ratio(other: Result | None, ours: Result | None) -> str:
    if other is None or ours is None or "done_us" not in other or "done_us" not in ours:
        return "-"
    return " / ".join(f"{other[figure] / ours[figure]:.2f}x" for figure in ("done_us", "step_us"))


def _work(results: Sequence[Result]) -> str:
    """The work of a step, in each way with graphs."""
    ways = [way for way in dict.fromkeys(found["way"] for found in results) if way != "compile"]
    figures: dict[str, Callable[[Result], str]] = {
        "host, forward": lambda found: f"{found['forward_us']:.0f}",
        "host, backward": lambda found: f"{found['backward_us']:.0f}",
        "allocations": lambda found: f"{found['allocations']:.0f}",
        "memory": lambda found: f"{nbytes(found['peak_bytes'])} / {nbytes(found['reserved_bytes'])}",
        "recordings": lambda found: str(found["recordings"]),
    }

    def cell(by_way: dict[str, Result], show: Callable[[Result], str]) -> str:
        return " → ".join(show(by_way[way]) if "done_us" in by_way.get(way, {}) else "-" for way in ways)

    rows = [[loop, *(cell(by_way, show) for show in figures.values())] for loop, by_way in _by_loop(results)]
    return markdown_table([" → ".join(_NAMES[way] for way in ways), *figures], rows)
