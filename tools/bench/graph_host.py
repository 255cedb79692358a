"""Host time of the part of a call that replays graphs, without its launches, for upstream and for ours.

usage: python tools/bench/graph_host.py [NAMES ...] [--ways WAYS] [--rounds N] [--calls N] [--out FILE]

NAMES are workloads, MLP, MLP-N (the same for any batch size), ACTOR (small inputs that arrive on the CPU), CRITICS or
GOOGLENET (independent kernels). Figures are medians in µs: *trees* inside compiled graphs without launches, *outside*
of Dynamo and AOTAutograd, *gpu*, and the *rest* of the latency. ``tools/bench/README.md`` explains the clocks.
"""

from __future__ import annotations

import argparse
import functools
import sys
import time
import timeit
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any
from unittest import mock

sys.path[:0] = [str(Path(__file__).resolve().parents[n]) for n in (2, 1)]

import torch
from torch._inductor.output_code import CompiledFxGraph

from bench.figures import has_gpu, several_of, write_figures
from bench.trained_models import Critic
from pygraph_trees.benchmark.inspection import pool_nbytes
from pygraph_trees.benchmark.measure import call_until_chosen, collector_off, schedule, synchroniser
from pygraph_trees.benchmark.program import Program, Ring
from pygraph_trees.benchmark.ways import FLAGS, Way, make_ways
from pygraph_trees.cli.target import resolve
from pygraph_trees.report import text
from pygraph_trees.report.log import journal

_GRAPH, _LAUNCH = (CompiledFxGraph, "__call__"), (torch.cuda.CUDAGraph, "replay")
_SETTLE = 10  # un-timed calls at the start of each block
_MARKED = 9  # calls
_SPIN_CYCLES = 2_000_000  # about 1 ms
_FIGURES = ("host", "trees", "launch", "latency")


@dataclass(frozen=True, slots=True)
class Times:
    """The times of one call, or the medians of many, in µs."""

    host: float  # until the call returns
    trees: float  # in compiled graphs, without launches
    launch: float
    latency: float  # until the GPU is done
    parts: tuple[float, ...] = ()  # of trees: before and after each graph's launch, if each has one

    @property
    def outside(self) -> float:
        return self.host - self.trees - self.launch


def measure(
    name: str, program: Program, rounds: int, calls: int, names: Sequence[str] = ("upstream", "ours")
) -> list[dict[str, Any]]:
    """A record for each way and regime, "same" and "fresh"."""
    ring, wait = Ring(program, 8), synchroniser(program.device)
    samples: dict[tuple[str, str], list[Times]] = {}
    ways = make_ways(program, names)
    with torch._dynamo.config.patch(recompile_limit=64):
        cost = clock_us()
        for way in ways:
            first, feed = len(journal.functions), ring.fresh
            with way.active():
                for _ in ring.sets * 2:
                    _call(program, way, feed, wait)
                if way.patched:
                    call_until_chosen(lambda way=way, feed=feed: _call(program, way, feed, wait), first)
        for way in schedule(ways, rounds):
            for regime, feed in (("same", ring.same), ("fresh", ring.fresh)):
                found = _block(program, way, feed, wait, calls, cost)
                samples.setdefault((way.name, regime), []).append(found)
    gpu, pools = {}, {way.name: pool_nbytes(way.managers) for way in ways}
    for way in ways:
        with way.active():
            gpu[way.name] = _gpu_us(program, way, ring, wait)
    records = []
    for (way_name, regime), found in samples.items():
        times, in_graphs = middle(found), gpu[way_name]
        rest = None if in_graphs is None else times.latency - times.outside - in_graphs
        # Other load of the host affects some rounds.
        rounded = {figure: [round(getattr(t, figure), 3) for t in found] for figure in _FIGURES}
        records.append(
            {"workload": name, "way": way_name, "regime": regime, **asdict(times), "outside": times.outside}
            | {"gpu": in_graphs, "rest": rest, "pool_bytes": pools[way_name], "samples": rounded}
        )
    return records


def _call(program: Program, way: Way, feed: Iterator[Any], wait: Callable[[], None]) -> None:
    own = next(feed)
    program.step(way.callable, own.args, own.kwargs)
    wait()


def _gpu_us(program: Program, way: Way, ring: Ring, wait: Callable[[], None]) -> float | None:
    """The median over several calls; None without a GPU. A spin kernel keeps the GPU busy until the launch is done."""
    if program.device.type != "cuda":
        return None
    owner, name = _LAUNCH
    replay, marks, found = getattr(owner, name), [], []

    def marked(graph: Any) -> None:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(_SPIN_CYCLES)
        begin.record()
        replay(graph)
        end.record()
        marks.append((begin, end))

    with mock.patch.object(owner, name, marked):
        for _ in range(_MARKED):
            marks.clear()
            _call(program, way, ring.same, wait)
            found.append(sum(begin.elapsed_time(end) for begin, end in marks) * 1e3)
    return median(found)


def _block(program: Program, way: Way, feed: Iterator[Any], wait: Callable[[], None], calls: int, cost: float) -> Times:
    found: list[Times] = []
    graphs: list[int] = []
    launches: list[int] = []
    # The clocks are installed last, because a way's patches replace the same functions.
    with way.active(), collector_off(), clock(*_GRAPH, graphs), clock(*_LAUNCH, launches):
        for number in range(_SETTLE + calls):
            own = next(feed)
            wait()
            graphs.clear()
            launches.clear()
            begin = time.perf_counter_ns()
            outputs = program.step(way.callable, own.args, own.kwargs)
            returned = time.perf_counter_ns()
            wait()
            done = time.perf_counter_ns()
            del outputs
            if number >= _SETTLE:
                clocked = (len(graphs) + len(launches)) / 2 * cost
                launch = between_us(launches)
                # A clock's cost is outside of its own section, and so inside the enclosing one.
                trees = between_us(graphs) - launch - len(launches) / 2 * cost
                host, latency = (returned - begin) / 1e3 - clocked, (done - begin) / 1e3 - clocked
                found.append(Times(host, trees, launch, latency, parts_us(graphs, launches, cost)))
    return middle(found)


def clock(owner: Any, name: str, times: list[int]) -> AbstractContextManager[Any]:
    """Notes in ``times`` when each call of a function begins and ends, in ns, with little overhead.

    After a long step, the clock's code is in no cache; that cost counts for the enclosing section.
    """
    function, note, now = getattr(owner, name), times.append, time.perf_counter_ns

    @functools.wraps(function)
    def clocked(*args: Any) -> Any:
        note(now())
        result = function(*args)
        note(now())
        return result

    return mock.patch.object(owner, name, clocked)


def clock_us() -> float:
    """The time that one clock takes outside of its own section."""
    times: list[int] = []
    watched = SimpleNamespace(function=lambda: None)
    timer = timeit.Timer("watched.function()", globals={"watched": watched})
    bare_s = timer.timeit(1000)
    with clock(watched, "function", times):
        whole_s = timer.timeit(1000)
    return max(0.0, (whole_s - bare_s) * 1e6 - between_us(times)) / 1000


def between_us(times: list[int]) -> float:
    """The summed durations of consecutive sections."""
    return (sum(times[1::2]) - sum(times[::2])) / 1e3


def parts_us(graphs: list[int], launches: list[int], cost: float) -> tuple[float, ...]:
    """The time before and after each graph's launch, in order; empty if a graph has no launch or several."""
    sections = [list(zip(times[::2], times[1::2], strict=True)) for times in (graphs, launches)]
    if len(sections[0]) != len(sections[1]):
        return ()
    parts: list[float] = []
    for (begin, end), (launch, launched) in zip(*sections, strict=True):
        if not begin <= launch <= launched <= end:
            return ()
        parts += [(launch - begin) / 1e3 - cost / 2, (end - launched) / 1e3 - cost / 2]
    return tuple(parts)


def middle(found: list[Times]) -> Times:
    """The median of each figure; of the parts, only if all have the same number."""
    figures = (median([getattr(t, name) for t in found]) for name in _FIGURES)
    counts = {len(t.parts) for t in found}
    parts = zip(*(t.parts for t in found), strict=True) if len(counts) == 1 else ()
    return Times(*figures, tuple(median(list(part)) for part in parts))


def table(records: list[dict[str, Any]]) -> str:
    """A line per record, and the ratio of the host times."""
    names = ("host", "trees", "launch", "outside", "latency", "gpu", "rest")
    theirs = {(r["workload"], r["regime"]): r["host"] for r in reversed(records)}  # of the first way
    rows = [
        [
            *(r["workload"], r["way"], r["regime"]),
            *("-" if r[name] is None else f"{r[name]:.1f}" for name in names),
            text.nbytes(r["pool_bytes"]),
            f"{r['host'] / theirs[r['workload'], r['regime']]:.2f}",
        ]
        for r in records
    ]
    lines = [text.table(["workload", "way", "inputs", *names, "pool", f"of {records[0]['way']}'s"], rows, left=3)]
    for r in records:
        if r["parts"]:
            each = [f"{before:.1f} + {after:.1f}" for before, after in zip(*[iter(r["parts"])] * 2, strict=True)]
            lines.append(f"{r['workload']} {r['way']} {r['regime']}, before and after each launch: {', '.join(each)}")
    return "\n".join(lines)


def perceptron(device: torch.device) -> Program:
    """Two small layers: almost nothing but the host."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8)).to(device)
    return Program(model, (torch.randn(16, 64, device=device),), context=torch.no_grad, name="MLP")


def perceptron_of_any_batch(device: torch.device) -> Program:
    """Two small layers compiled for any batch size, which is then an input."""
    program = perceptron(device)
    torch._dynamo.mark_dynamic(program.args[0], 0)
    return replace(program, name="MLP-N")


def actor_critic(device: torch.device) -> Program:
    """An actor and a critic of two hidden layers each; the observations arrive on the CPU."""

    def hidden(outputs: int) -> torch.nn.Module:
        layers = torch.nn.Linear(64, 256), torch.nn.Tanh(), torch.nn.Linear(256, 256), torch.nn.Tanh()
        return torch.nn.Sequential(*layers, torch.nn.Linear(256, outputs)).to(device)

    torch.manual_seed(0)
    actor, critic = hidden(8), hidden(1)

    def fn(observations: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        there = observations.to(device)
        return actor(there), critic(there)

    return Program(fn, (torch.randn(32, 64),), context=torch.no_grad, name="ACTOR")


def twin_critics(device: torch.device) -> Program:
    """The losses of SAC's critics, as in ``trained_models.py``, and their gradients."""
    torch.manual_seed(0)
    critics = torch.nn.ModuleList(Critic(17, 6, 256) for _ in range(2)).to(device)

    def fn(states: torch.Tensor, actions: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        losses = [torch.nn.functional.mse_loss(critic(states, actions), wanted) for critic in critics]
        return losses[0] + losses[1]

    args = (*(torch.randn(256, size, device=device) for size in (17, 6)), torch.randn(256, device=device))
    parameters = [*critics.parameters()]
    return Program(fn, args, training=True, loss=lambda loss: loss, parameters=parameters, name="CRITICS")


def googlenet(device: torch.device) -> Program:
    """Inference of one image."""
    from torchvision.models import googlenet as make  # type: ignore[import-not-found,unused-ignore]

    torch.manual_seed(0)
    model = make(weights=None, init_weights=False).to(device).eval()
    return Program(model, (torch.randn(1, 3, 224, 224, device=device),), context=torch.no_grad, name="GOOGLENET")


PROGRAMS: dict[str, Callable[[torch.device], Program]] = {
    "MLP": perceptron,
    "MLP-N": perceptron_of_any_batch,
    "ACTOR": actor_critic,
    "CRITICS": twin_critics,
    "GOOGLENET": googlenet,
}


def program_of(name: str) -> Program:
    """A small program or a workload, on the GPU."""
    device = torch.device("cuda")
    return PROGRAMS[name](device) if name in PROGRAMS else resolve(name, device)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", default=["MLP", "BERT-I", "DLRM"], help="default: MLP BERT-I DLRM")
    parser.add_argument("--ways", type=several_of(FLAGS), default=["upstream", "ours"], help="default: upstream,ours")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--calls", type=int, default=100, help="in a block (100)")
    parser.add_argument("--out", type=Path, help="file of the figures, .json")
    options = parser.parse_args()
    if not has_gpu():
        return 2
    found: list[dict[str, Any]] = []
    for name in options.names:
        records = measure(name, program_of(name), options.rounds, options.calls, options.ways)
        print(table(records), flush=True)
        found += records
        # Written after each program, so an interrupted run keeps its measurements.
        write_figures(options.out, found, rounds=options.rounds, calls=options.calls)
    return 0


if __name__ == "__main__":
    sys.exit(main())
