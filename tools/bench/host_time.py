"""Host time per call, ours against upstream's, without the bias of compilation order.

usage: python tools/bench/host_time.py [NAMES ...] [--rounds N] [--calls N] [--out FILE]

Each way is compiled twice in one process, in the order upstream, ours, ours, upstream. All four alternate in rounds, in
blocks of calls that are waited for, and as many that are not. The figure is the ratio of the means of the pairs, as the
median over rounds. The spread within a pair shows how reliable it is.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[n]) for n in (2, 1)]

import torch

from bench.figures import has_gpu, options_of, write_figures
from pygraph_trees.benchmark.rings import Ring
from pygraph_trees.benchmark.timing import synchroniser, time_block
from pygraph_trees.benchmark.tuning import own_cache
from pygraph_trees.benchmark.ways import make_ways
from pygraph_trees.cli.target import resolve

_ORDER = ("upstream", "ours", "ours", "upstream")  # of compilation
_SETTLE = 5  # un-timed calls before a block


def measure(name: str, rounds: int, calls: int) -> dict[str, Any]:
    """Microseconds per call: median over rounds for each of the four, and the ratio of ours to upstream's."""
    program = resolve(name, torch.device("cuda"))
    ring, wait = Ring(program, 4), synchroniser(program.device)
    ways = [way for kind in _ORDER for way in make_ways(program, [kind])]
    samples: list[list[float]] = [[] for _ in ways]
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
                samples[index].append(median(block.host_s) * 1e6)
    ratios = [(o1 + o2) / (u1 + u2) for u1, o1, o2, u2 in zip(*samples, strict=True)]
    return {
        "workload": name,
        "host_us": {
            f"{kind} {number}": median(s) for number, (kind, s) in enumerate(zip(_ORDER, samples, strict=True), 1)
        },
        "ratio": median(ratios),
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
        figures = ", ".join(f"{way} {us:.1f} us" for way, us in result["host_us"].items())
        print(f"{result['workload']}: ours {result['ratio']:.4f} of upstream ({figures})")
    write_figures(options.out, found, rounds=options.rounds, calls=options.calls)
    return 0


if __name__ == "__main__":
    sys.exit(main())
