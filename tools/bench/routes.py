"""Routes of inputs compared over a grid of synthetic programs: the cost of a patched kernel, a slot, a copy.

usage: python tools/bench/routes.py [--rounds N] [--routes auto,patch,...] [--out FILE]

A program has n small inputs and c Triton kernels that read all of them; with load, it ends with a large matrix product.
The table shows µs by route and share of calls with new addresses. ``tools/bench/README.md`` has details.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[n]) for n in (2, 1)]

import torch

import pygraph_trees
from bench.figures import has_gpu, several_of, write_figures
from pygraph_trees.benchmark import measure as timing
from pygraph_trees.benchmark.program import Program
from pygraph_trees.benchmark.ways import Way, make_ways
from pygraph_trees.report.log import journal

Inputs = tuple[torch.Tensor, ...]
FLAG = "triton.pygraph_indirection"
ROUTES = ("patch", "table", "off", "auto")
GRID = ((1, 4, False), (1, 32, False), (8, 4, False), (8, 32, False), (32, 8, False), (32, 32, False), (8, 32, True))
RATES = (0.0, 0.5, 1.0)  # shares of calls with new addresses
_SETS = 8
_WARM_CALLS = 12
_WIDTH, _LOAD = 16, 4096


class Consumers(torch.nn.Module):
    """``count`` kernels that read all inputs, each [16, 16]; the load is one product of 4096x4096."""

    def __init__(self, count: int, loaded: bool) -> None:
        super().__init__()
        self.count = count
        self.register_buffer("between", torch.eye(_WIDTH))
        self.register_buffer("load", torch.ones(_LOAD, _LOAD, dtype=torch.bfloat16) if loaded else None)

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        total = inputs[0]
        for _ in range(self.count):
            total = (total @ self.between).sin() + sum(inputs)
        if self.load is not None:
            total = total + (self.load @ self.load)[:_WIDTH, :_WIDTH]
        return total


def feed(sets: Sequence[Inputs], rate: float) -> Iterator[Inputs]:
    """Input sets for consecutive calls; the given share of them has other addresses than the call before."""
    if rate == 0:
        return itertools.repeat(sets[0])
    each = round(1 / rate)
    return (sets[number // each % len(sets)] for number in itertools.count())


def measure(
    inputs: int, consumers: int, loaded: bool, routes: Sequence[str], effort: timing.Effort, device: torch.device
) -> dict[str, Any]:
    """Microseconds of one program, by route and rate, with all rounds."""
    sets = [tuple(torch.rand(_WIDTH, _WIDTH, device=device) for _ in range(inputs)) for _ in range(_SETS)]
    program = Program(fn=Consumers(consumers, loaded).to(device).eval(), args=sets[0])
    wait = timing.synchroniser(device)
    ways: dict[tuple[str, float], Way] = {}
    chosen: dict[str, str | None] = {}
    cells = [(route, rate) for rate in RATES for route in routes]
    for route, rate in cells:
        if route != "auto" and rate != RATES[0]:
            ways[route, rate] = ways[route, RATES[0]]
            continue
        first = len(journal.functions)
        (way,) = make_ways(program, ["ours"])
        ways[route, rate] = way
        with torch._inductor.config.patch({FLAG: route}), way.active():
            for _, given in zip(range(_WARM_CALLS), feed(sets, 1.0), strict=False):
                timing.timed_call(_step(program, way), given, wait)
            if route == "auto":
                given = feed(sets, rate)
                timing.call_until_chosen(
                    lambda way=way, given=given: timing.timed_call(_step(program, way), next(given), wait), first, rate
                )
                chosen[str(rate)] = next((f.route for f in pygraph_trees.report().functions[first:]), None)
    samples: dict[str, dict[str, list[float]]] = {}
    for route, rate in timing.schedule(cells, effort.rounds):
        way = ways[route, rate]
        with way.active():
            given = feed(sets, rate)
            (steady, _) = timing.timed_call(_step(program, way), next(given), wait)
            block = timing.time_block(_step(program, way), given, effort.block_calls(steady), effort.settle_calls, wait)
        found = samples.setdefault(f"{route} {rate}", {"latency_us": [], "throughput_us": [], "host_us": []})
        found["latency_us"].append(block["latency_ms"] * 1e3)
        found["throughput_us"].append(block["throughput_ms"] * 1e3)
        found["host_us"].append(block["host_us"])
    return {
        "program": f"{inputs} x {consumers}{' loaded' if loaded else ''}",
        "chosen": chosen,
        "medians": {cell: {name: median(all_) for name, all_ in found.items()} for cell, found in samples.items()},
        "samples": samples,
    }


def _step(program: Program, way: Way) -> Any:
    return lambda given: program.step(way.callable, given, {})


def table(results: Sequence[dict[str, Any]], routes: Sequence[str]) -> str:
    """A row for each program and rate: latency and throughput by route."""
    lines = [f"{'inputs x consumers':20}{'new':>5}" + "".join(f"{route:>16}" for route in routes)]
    for result in results:
        for rate in RATES:
            cells = [result["medians"][f"{route} {rate}"] for route in routes]
            figures = "".join(f"{cell['latency_us']:9.1f}{cell['throughput_us']:7.1f}" for cell in cells)
            lines.append(f"{result['program']:20}{rate:5.1f}{figures}")
            chosen = result["chosen"].get(str(rate))
            lines += [f"{'':25}  {chosen}"] if chosen else []
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--routes", type=several_of(ROUTES), default=ROUTES, metavar="ROUTE,...", help=",".join(ROUTES))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if not has_gpu():
        return 2
    routes, found = options.routes, []
    effort, device = timing.Effort(rounds=options.rounds, block_s=0.03), torch.device("cuda")
    with torch._dynamo.config.patch(recompile_limit=4 * len(routes) * len(GRID)):
        for inputs, consumers, loaded in GRID:
            found.append(measure(inputs, consumers, loaded, routes, effort, device))
            print(table(found[-1:], routes), flush=True)
            write_figures(options.out, found, rounds=options.rounds, routes=routes)
    print("latency and throughput, in µs:\n" + table(found, routes))
    return 0


if __name__ == "__main__":
    sys.exit(main())
