"""What it costs that outputs are kept: the loop ``out = model(x)``, in which the previous outputs are still alive.

usage: python tools/bench/kept_outputs.py [NAMES ...] [--rounds N] [--calls N] [--out FILE]

NAMES are workloads or the programs of ``small_programs.py``. Each is compiled twice with ``pygraph_outputs="keep"`` and
twice with "upstream", which overwrites outputs. All alternate in rounds of calls that nothing waits for. Figures are
medians over rounds, in µs per call: the host's time, and the time between events on the GPU.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[n]) for n in (2, 1)]

import torch

from bench.figures import has_gpu, options_of, write_figures
from bench.small_programs import program_of
from pygraph_trees.benchmark.program import Program, tensors_of
from pygraph_trees.benchmark.rings import Ring
from pygraph_trees.benchmark.settling import call_until_chosen, functions_so_far
from pygraph_trees.benchmark.timing import collector_off, schedule
from pygraph_trees.benchmark.ways import Way, make_ways

_ORDER = ("ours:overwrite", "ours:keep", "ours:keep", "ours:overwrite")  # of compilation
_SETTLE = 10  # un-timed calls at the start of each block


def measure(name: str, program: Program, rounds: int, calls: int) -> dict[str, Any]:
    """The figures of one program; ``peak_bytes`` is allocated during a block, beyond what was before."""
    ring = Ring(program, 4)
    ways = [way for kind in _ORDER for way in make_ways(program, [kind])]
    limit = torch._dynamo.config.recompile_limit * len(ways)
    blocks: dict[str, list[tuple[float, float, int]]] = {kind: [] for kind in _ORDER}
    with torch._dynamo.config.patch(recompile_limit=limit):
        for way in ways:
            first, feed = functions_so_far(), ring.fresh()
            with way.active():
                for _ in ring.sets * 3:
                    _call(program, way, feed)
                call_until_chosen(lambda way=way, feed=feed: _call(program, way, feed), first)
        for _, way in schedule(ways, rounds):
            with way.active():
                blocks[way.name].append(_block(program, way, ring.fresh(), calls))
    found: dict[str, Any] = {"workload": name, "output_bytes": _output_bytes(program, ways[1], ring)}
    for kind, measured in blocks.items():
        host_us, gpu_us, peak_bytes = (statistics.median(values) for values in zip(*measured, strict=True))
        found[kind.partition(":")[2]] = {"host_us": host_us, "gpu_us": gpu_us, "peak_bytes": round(peak_bytes)}
    return found


def _call(program: Program, way: Way, feed: Iterator[Any]) -> Any:
    inputs = next(feed)
    if program.training or program.is_step:
        return program.step(way.callable, inputs.args, inputs.kwargs)
    with program.context():
        return way.callable(*inputs.args, **inputs.kwargs)


def _block(program: Program, way: Way, feed: Iterator[Any], calls: int) -> tuple[float, float, int]:
    """Time per call on the host and on the GPU in µs, and the most bytes that were allocated meanwhile."""
    outputs: Any = None
    for _ in range(_SETTLE):
        outputs = _call(program, way, feed)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with collector_off():
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before, start = torch.cuda.memory_allocated(), time.perf_counter_ns()
        begin.record()
        for _ in range(calls):
            outputs = _call(program, way, feed)
        host_us = (time.perf_counter_ns() - start) / calls / 1e3
        end.record()
        torch.cuda.synchronize()
    del outputs
    return host_us, begin.elapsed_time(end) * 1e3 / calls, torch.cuda.max_memory_allocated() - before


def _output_bytes(program: Program, way: Way, ring: Ring) -> int:
    with way.active():
        outputs = tensors_of(_call(program, way, ring.fresh()))
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for _, tensor in outputs}
    return sum(storages.values())


def line(found: dict[str, Any]) -> str:
    """One line of the table."""
    kept, overwritten = found["keep"], found["overwrite"]
    peak = kept["peak_bytes"] - overwritten["peak_bytes"]
    return (
        f"{found['workload']:8} host {overwritten['host_us']:8.1f} -> {kept['host_us']:8.1f} us, "
        f"GPU {overwritten['gpu_us']:8.1f} -> {kept['gpu_us']:8.1f} us ({kept['gpu_us'] / overwritten['gpu_us']:.3f}), "
        f"peak {peak:+} B for {found['output_bytes']} B of outputs"
    )


def main() -> int:
    options = options_of(__doc__, ["MLP", "BERT-I", "DLRM"], rounds=9, calls=100)
    if not has_gpu():
        return 2
    results = []
    for name in options.names:
        results.append(measure(name, program_of(name), options.rounds, options.calls))
        print(line(results[-1]), flush=True)
        write_figures(options.out, results, rounds=options.rounds, calls=options.calls)
    return 0


if __name__ == "__main__":
    sys.exit(main())
