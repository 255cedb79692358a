"""Time per call, ours against upstream's, without the bias of compilation order.

usage: python tools/bench/host_time.py [NAMES ...] [--rounds N] [--calls N] [--out FILE]

NAMES are workloads or the programs of ``small_programs.py``. Each way is compiled twice in one process, in the order
upstream, ours, ours, upstream. All four alternate in rounds, in blocks of calls that are waited for (host time and
latency), and as many that are not (throughput). A figure is the ratio of the means of the pairs, as the median over
rounds. The spread within a pair shows how reliable it is.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[n]) for n in (2, 1)]

import torch

from bench.figures import has_gpu, options_of, write_figures
from bench.small_programs import program_of
from pygraph_trees.benchmark.rings import Ring
from pygraph_trees.benchmark.timing import Block, synchroniser, time_block
from pygraph_trees.benchmark.tuning import own_cache
from pygraph_trees.benchmark.ways import make_ways

_ORDER = ("upstream", "ours", "ours", "upstream")  # of compilation
_SETTLE = 5  # un-timed calls before a block
_FIGURES: dict[str, Callable[[Block], float]] = {  # seconds per call
    "host": lambda block: median(block.host_s),
    "latency": lambda block: median(block.latency_s),
    "call": lambda block: block.throughput_s,
}


def measure(name: str, rounds: int, calls: int) -> dict[str, Any]:
    """Microseconds per call: median over rounds for each of the four, and the ratio of ours to upstream's."""
    program = program_of(name)
    ring, wait = Ring(program, 4), synchroniser(program.device)
    ways = [way for kind in _ORDER for way in make_ways(program, [kind])]
    samples: dict[str, list[list[float]]] = {figure: [[] for _ in ways] for figure in _FIGURES}
    limit = torch._dynamo.config.recompile_limit * len(ways)
    with (
        torch._dynamo.config.patch(recompile_limit=limit),
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder,
    ):
        for way in ways:
            with own_cache(Path(folder)), way.active():
                for inputs in ring.sets * 2:
                    program.step(way.callable, inputs.args, inputs.kwargs)
        wait()
        for number in range(rounds):
            for index in _permuted(len(ways), number):
                way = ways[index]
                with way.active():
                    block = time_block(
                        lambda inputs: program.step(way.callable, inputs.args, inputs.kwargs),  # noqa: B023
                        ring.fresh(),
                        calls,
                        _SETTLE,
                        wait,
                    )
                for figure, seconds in _FIGURES.items():
                    samples[figure][index].append(seconds(block) * 1e6)
    ratios = {
        figure: [(o1 + o2) / (u1 + u2) for u1, o1, o2, u2 in zip(*found, strict=True)]
        for figure, found in samples.items()
    }
    names = [f"{kind} {number}" for number, kind in enumerate(_ORDER, 1)]
    return {
        "workload": name,
        **{f"{figure}_us": dict(zip(names, map(median, found), strict=True)) for figure, found in samples.items()},
        "ratio": {figure: median(found) for figure, found in ratios.items()},
        "ratios": ratios,
    }


def _permuted(count: int, number: int) -> list[int]:
    """All of ``range(count)``, with another start each round, reversed every other round."""
    order = [(i + number // 2) % count for i in range(count)]
    return order[::-1] if number % 2 else order


def main() -> int:
    options = options_of(__doc__, ["BERT-I", "BERT"], rounds=16, calls=100)
    if not has_gpu():
        return 2
    found = [measure(name, options.rounds, options.calls) for name in options.names]
    for result in found:
        for figure, ratio in result["ratio"].items():
            figures = ", ".join(f"{way} {us:.1f} us" for way, us in result[f"{figure}_us"].items())
            print(f"{result['workload']}, {figure}: ours {ratio:.4f} of upstream ({figures})")
    write_figures(options.out, found, rounds=options.rounds, calls=options.calls)
    return 0


if __name__ == "__main__":
    sys.exit(main())
