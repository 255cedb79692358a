"""Time to record a function's graph, ours against upstream's, over many recordings, and the memory of the pools.

usage: python tools/bench/record_time.py [NAMES ...] [--rounds N] [--out FILE]

Each round compiles the program again in both ways and times the calls after the first. The time to record is their
excess over the latest of them. The first round is left out. Figures are medians over rounds, and of the ratios of each.
``tools/bench/README.md`` has details.
"""

from __future__ import annotations

import gc
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

sys.path[:0] = [str(Path(__file__).resolve().parents[n]) for n in (2, 1)]

import torch

from bench.figures import has_gpu, options_of, write_figures
from pygraph_trees.benchmark import graphs
from pygraph_trees.benchmark.rings import Ring
from pygraph_trees.benchmark.timing import collector_off, synchroniser, timed_call
from pygraph_trees.benchmark.tuning import own_cache
from pygraph_trees.benchmark.ways import make_ways
from pygraph_trees.cli.target import resolve

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pygraph_trees.benchmark.program import Program
    from pygraph_trees.benchmark.rings import InputSet

_KINDS = ("upstream", "ours")
_CALLS = 16  # after the first; each workload is steady by then
_STEADY = 8  # of them, the latest ones


def measure(name: str, rounds: int) -> dict[str, Any]:
    """Milliseconds to record, by way, and the ratio of ours to upstream's; each with all its rounds."""
    program = resolve(name, torch.device("cuda"))
    ring, wait = Ring(program, 2), synchroniser(program.device)
    samples: dict[str, list[float]] = {kind: [] for kind in _KINDS}
    pools: dict[str, list[int]] = {kind: [] for kind in _KINDS}
    with (
        torch._dynamo.config.patch(recompile_limit=4 * (rounds + 1)),
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder,
        own_cache(Path(folder)),
    ):
        for number in range(rounds + 1):
            for kind in _KINDS[:: -1 if number % 2 else 1]:
                ms, nbytes = _record(program, kind, ring.sets[0], wait)
                samples[kind].append(ms)
                pools[kind].append(nbytes)
    kept = {kind: ms[1:] for kind, ms in samples.items()}
    ratios = [ours / theirs for theirs, ours in zip(*(kept[kind] for kind in _KINDS), strict=True)]
    return {
        "workload": name,
        "record_ms": {kind: median(ms) for kind, ms in kept.items()},
        "ratio": median(ratios),
        "pool_bytes": {kind: median(pools[kind][1:]) for kind in _KINDS},
        "samples": samples,
        "pool_samples": pools,
    }


def _record(program: Program, kind: str, inputs: InputSet, wait: Callable[[], None]) -> tuple[float, int]:
    """Milliseconds to record, and the bytes that the graph pool has reserved afterwards."""
    torch._dynamo.reset()
    gc.collect()
    (way,) = make_ways(program, [kind])

    def call(_: None) -> object:
        return program.step(way.callable, inputs.args, inputs.kwargs)

    with way.active():
        call(None)
        with collector_off():
            durations = [timed_call(call, None, wait)[0] for _ in range(_CALLS)]
        return excess_ms(durations), graphs.pool_nbytes(way.managers)


def excess_ms(durations_s: Sequence[float]) -> float:
    """The time that calls took beyond that of the latest ones."""
    return (sum(durations_s) - median(durations_s[-_STEADY:]) * len(durations_s)) * 1e3


def main() -> int:
    options = options_of(__doc__, ["DLRM", "TKE"], rounds=9)
    if not has_gpu():
        return 2
    found = []
    for name in options.names:
        found.append(result := measure(name, options.rounds))
        figures = ", ".join(f"{way} {ms:.2f} ms" for way, ms in result["record_ms"].items())
        pools = ", ".join(f"{way} {nbytes / 1e6:.1f} MB" for way, nbytes in result["pool_bytes"].items())
        print(f"{name}: to record, ours {result['ratio']:.2f} of upstream ({figures}); pool {pools}", flush=True)
        write_figures(options.out, found, rounds=options.rounds)  # after each program, because a run may be interrupted
    return 0


if __name__ == "__main__":
    sys.exit(main())
