"""The cost of a replay if there are many functions, or many recordings of one function.

usage: python tools/bench/many.py [--functions N] [--recordings N] [--out FILE]

*functions*: host time of a call of one function, with few others in the process and with N. *recordings*: host time of
a call whose recording has to be found among one or N. Upstream is measured first, then ours. Figures are medians in µs;
launches are included, Dynamo is not. ``tools/bench/README.md`` describes the programs.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[n]) for n in (2, 1)]

import torch
from torch._inductor import cudagraph_trees

import inductor_patches
from bench.figures import has_gpu, write_figures
from pygraph_trees.benchmark.measure import collector_off

_CALLS = 300
_SETTLE = 6  # calls until a function is recorded and replays normally

Function = Callable[[list[Any]], Any]
step = torch.compiler.cudagraph_mark_step_begin


def handed_over(model: Callable[..., tuple[torch.Tensor, ...]], x: torch.Tensor, outputs: int = 1) -> Function:
    """A function of one tensor as Inductor passes it: it takes a list and empties it."""

    def boxed(inputs: list[Any]) -> list[torch.Tensor]:
        own = list(inputs)
        inputs.clear()
        return list(model(*own))

    return cudagraph_trees.cudagraphify_impl(
        boxed, [x], (), device_index=0, is_backward=False, is_inference=True, stack_traces=[None] * outputs
    )


def one_of_many_functions(count: int) -> dict[str, float]:
    """The times with no other function, and with ``count`` others."""
    x = torch.ones(64, device="cuda")
    measured = handed_over(lambda x: (x * 2 + 1,), x)

    def timed() -> float:
        found = []
        for number in range(_SETTLE + _CALLS):
            step()
            begin = time.perf_counter_ns()
            measured([x])
            if number >= _SETTLE:
                found.append((time.perf_counter_ns() - begin) / 1e3)
            torch.cuda.synchronize()
        return median(found)

    with collector_off():
        before = timed()
    others = [handed_over(lambda x, number=number: (x + number,), x) for number in range(count)]
    for other in others * 3:  # warms up, records, replays
        step()
        other([x])
    with collector_off():
        return {"few": before, "many": timed()}


def one_of_many_recordings(count: int) -> dict[str, float]:
    """The times with one recording, with ``count`` in turn, and of the slowest of these."""
    outputs = max(1, (count - 1).bit_length())
    x = torch.ones(64, device="cuda")
    first = handed_over(lambda x: tuple(x + number for number in range(outputs)), x, outputs)
    second = handed_over(lambda x: (x * 2,), x)

    def call(kept: int) -> float:
        step()
        made = first([x])
        held = [output for number, output in enumerate(made) if kept >> number & 1]
        del made
        begin = time.perf_counter_ns()
        second([x])
        took = (time.perf_counter_ns() - begin) / 1e3
        del held
        return took

    def timed(sets: range) -> list[float]:
        for _ in range(_SETTLE):
            for kept in sets:
                call(kept)
        found: dict[int, list[float]] = {kept: [] for kept in sets}
        for _ in range(max(20, _CALLS // len(sets))):
            for kept in sets:
                found[kept].append(call(kept))
                torch.cuda.synchronize()
        return [median(times) for times in found.values()]

    with collector_off():
        (alone,) = timed(range(1, 2))  # with none held, the second function would not follow the first
        each = timed(range(count))
    return {"one": alone, "many": median(each), "slowest of many": max(each)}


def measure(functions: int, recordings: int) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for way in ("upstream", "ours"):
        if way == "upstream":
            inductor_patches.uninstall()
        try:
            for name, count, of in (
                ("functions", functions, one_of_many_functions),
                ("recordings", recordings, one_of_many_recordings),
            ):
                cudagraph_trees.reset_cudagraph_trees()
                found.append({"what": name, "count": count, "way": way, "us": of(count)})
        finally:
            inductor_patches.install()
    cudagraph_trees.reset_cudagraph_trees()
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--functions", type=int, default=1000)
    parser.add_argument("--recordings", type=int, default=50)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if not has_gpu():
        return 2
    found = measure(options.functions, options.recordings)
    for record in found:
        figures = ", ".join(f"{name} {us:.1f}" for name, us in record["us"].items())
        print(f"{record['count']} {record['what']}, {record['way']}: {figures}", flush=True)
    write_figures(options.out, found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
