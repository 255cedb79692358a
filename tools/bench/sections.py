"""Host time between a call and its launch, and during recording, by section, ours and upstream's.

usage: python tools/bench/sections.py [NAMES ...] [--recording] [--calls N] [--out FILE]

A section is a function of torch or of this project with a clock around it; its own time excludes the sections inside.
Calls are also measured without clocks. A replay in C++ has no sections. NAMES are workloads, or MLP, MLP-N (any batch
size), CHAIN, RESNET18.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import inspect
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[n]) for n in (2, 1)]

import torch
from torch._inductor import cudagraph_trees
from torch._inductor.output_code import CompiledFxGraph

from bench.figures import has_gpu, write_figures
from pygraph_trees.benchmark.program import Program
from pygraph_trees.benchmark.rings import Ring
from pygraph_trees.benchmark.timing import collector_off, median, synchroniser
from pygraph_trees.benchmark.ways import Way, make_ways
from pygraph_trees.cli.target import resolve
from pygraph_trees.cuda.driver import Driver
from pygraph_trees.indirection import inputs, patching
from pygraph_trees.indirection import placeholder as placeholder
from pygraph_trees.indirection import relocations as relocations
from pygraph_trees.indirection.pool import PoolRanges
from pygraph_trees.trees import manager, recording

_Node, _Manager = recording.Upstream, manager.Upstream
_SETTLE = 20  # calls until all is steady

# Owner, attribute, and name in the table.
REPLAY: tuple[tuple[Any, str, str], ...] = (
    (CompiledFxGraph, "__call__", "compiled graph"),
    (manager.Manager, "replay_fast", "ours: fast path"),
    (_Manager, "run", "manager.run"),
    (manager.Manager, "_run", "ours: manager._run"),
    (_Manager, "_run", "manager._run"),
    (_Manager, "try_end_curr_execution", "end of the last path"),
    (recording.Recording, "accepts", "ours: accepts"),
    (recording.Recording, "check_invariants", "ours: check_invariants"),
    (_Node, "check_invariants", "check_invariants"),
    (inputs.LiveInputs, "prepare", "ours: addresses of the inputs"),
    (patching.Patches, "apply", "ours: patches"),
    (recording.Recording, "run", "ours: node.run"),
    (_Node, "run", "node.run"),
    (_Node, "_copy_inputs_and_remove_from_src", "copies of the inputs"),
    (torch.cuda.CUDAGraph, "replay", "launch"),
    (_Node, "reconstruct_outputs", "outputs"),
)
RECORDING: tuple[tuple[Any, str, str], ...] = (
    (_Manager, "run_eager", "warm-up"),
    (manager.Manager, "record_function", "ours: record_function"),
    (_Manager, "record_function", "record_function"),
    (_Node, "__init__", "node"),
    (_Node, "_allocate_and_copy_recording_inputs", "inputs of the recording"),
    (recording, "choose", "ours: inputs at placeholder addresses"),
    (placeholder.Placeholders, "__init__", "ours: placeholders mapped"),
    (placeholder.Placeholders, "close", "ours: placeholders unmapped"),
    (_Node, "_record", "capture"),
    (cudagraph_trees, "check_memory_pool", "check of the pool"),
    (inputs.LiveInputs, "set_up", "ours: set-up of the graph"),
    (inputs, "scan", "ours: scan"),
    (Driver, "kernel_node", "ours: kernel nodes"),
    (Driver, "layout", "ours: layouts of kernels"),
    (relocations._Reader, "search_kernels", "ours: search of the parameters"),
    (inputs, "Patches", "ours: patches made"),
    (patching.Patches, "apply", "ours: patches applied"),
    (PoolRanges, "_look", "ours: snapshots of the pool"),
    (torch.cuda.CUDAGraph, "replay", "launch"),
    (torch.cuda, "synchronize", "waiting"),
)


@dataclass(slots=True)
class Section:
    """The total time of one section, in ns."""

    calls: int = 0
    ns: int = 0  # sections inside included
    inside_ns: int = 0  # of that, in sections inside

    @property
    def own_ns(self) -> int:
        return self.ns - self.inside_ns


@dataclass(slots=True)
class Clocks:
    """Sections by name; they are noted only while ``on``."""

    read: Callable[[], int] = time.perf_counter_ns
    on: bool = False
    sections: dict[str, Section] = field(default_factory=dict)
    _open: list[Section] = field(default_factory=list)

    def around(self, function: Callable[..., Any], label: str) -> Callable[..., Any]:
        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            if not self.on:
                return function(*args, **kwargs)
            section = self.sections.setdefault(label, Section())
            self._open.append(section)
            begin = self.read()
            try:
                return function(*args, **kwargs)
            finally:
                taken = self.read() - begin
                self._open.pop()
                section.calls += 1
                section.ns += taken
                if self._open:
                    self._open[-1].inside_ns += taken

        return timed

    @contextmanager
    def watching(self, watched: tuple[tuple[Any, str, str], ...]) -> Iterator[None]:
        """Puts clocks around the named functions, and removes them afterwards."""
        with ExitStack() as undo:
            for owner, name, label in watched:
                inherited = isinstance(owner, type) and name not in vars(owner)
                before = inspect.getattr_static(owner, name)
                setattr(owner, name, self.around(before, label))
                undo.callback(delattr, owner, name) if inherited else undo.callback(setattr, owner, name, before)
            yield

    @contextmanager
    def noting(self) -> Iterator[dict[str, Section]]:
        """The sections of this block only."""
        self.sections, self.on = {}, True
        try:
            yield self.sections
        finally:
            self.on = False

    def cost_ns(self, times: int = 20_000) -> float:
        """The cost of a pair of clocks around nothing."""
        timed = self.around(lambda: None, "nothing")
        with self.noting():
            begin = time.perf_counter_ns()
            for _ in range(times):
                timed()
            return (time.perf_counter_ns() - begin) / times


@dataclass(frozen=True, slots=True)
class Result:
    """One way in one regime."""

    workload: str
    way: str
    regime: str  # "same", "fresh" or "recording"
    host_us: float  # a call without clocks; for a recording, the call that records, waiting included
    clocked_us: float  # a call with clocks
    calls: int  # number of calls in the sections
    sections: dict[str, tuple[float, float, float]]  # by name: calls, us and own us, per call


def replays(name: str, program: Program, calls: int) -> list[Result]:
    """Both ways, with the same inputs and with fresh ones; every call is synchronised."""
    clocks, ring, wait = Clocks(), Ring(program, 8), synchroniser(program.device)
    ways = make_ways(program, ["upstream", "ours"])
    found: list[Result] = []
    with torch._dynamo.config.patch(recompile_limit=64):
        for way in ways:
            with way.active(), clocks.watching(REPLAY):  # a manager's run is looked up once, when a function is added
                for own in ring.sets * 2:
                    program.step(way.callable, own.args, own.kwargs)
        for way in ways:
            for regime in ("same", "fresh"):
                feed = ring.same() if regime == "same" else ring.fresh()
                with way.active(), collector_off():
                    _host_us(program, way, feed, wait, _SETTLE)
                    plain = _host_us(program, way, feed, wait, calls)
                    with clocks.watching(REPLAY):
                        _host_us(program, way, feed, wait, _SETTLE)
                        with clocks.noting() as sections:
                            clocked = _host_us(program, way, feed, wait, calls)
                found.append(Result(name, way.name, regime, plain, clocked, calls, _a_call(sections, calls)))
    return found


def _host_us(program: Program, way: Way, feed: Iterator[Any], wait: Callable[[], None], calls: int) -> float:
    taken = []
    for _ in range(calls):
        own = next(feed)
        wait()
        begin = time.perf_counter_ns()
        outputs = program.step(way.callable, own.args, own.kwargs)
        taken.append((time.perf_counter_ns() - begin) / 1e3)
        del outputs
    return median(taken)


def recordings(name: str, program: Program, rounds: int) -> list[Result]:
    """Both ways, each compiled ``rounds`` times and once more first; the second call of each records."""
    clocks, wait = Clocks(), synchroniser(program.device)
    taken: dict[tuple[str, bool], list[float]] = {}
    noted: dict[str, dict[str, Section]] = {}
    with torch._dynamo.config.patch(recompile_limit=64):
        for number in range(2 * rounds + 2):
            clocked = number % 2 == 1
            for kind in ("upstream", "ours"):
                torch._dynamo.reset()
                (way,) = make_ways(program, [kind])
                with way.active(), clocks.watching(RECORDING if clocked else ()):
                    program.step(way.callable, program.args, program.kwargs)
                    with collector_off(), clocks.noting() if clocked else nullcontext({}) as sections:
                        wait()
                        begin = time.perf_counter_ns()
                        program.step(way.callable, program.args, program.kwargs)
                        wait()
                        us = (time.perf_counter_ns() - begin) / 1e3
                if number < 2:
                    continue
                taken.setdefault((kind, clocked), []).append(us)
                for label, section in sections.items():
                    total = noted.setdefault(kind, {}).setdefault(label, Section())
                    total.calls += section.calls
                    total.ns += section.ns
                    total.inside_ns += section.inside_ns
    return [
        Result(
            name,
            kind,
            "recording",
            median(taken[kind, False]),
            median(taken[kind, True]),
            rounds,
            _a_call(noted.get(kind, {}), rounds),
        )
        for kind in ("upstream", "ours")
    ]


def _a_call(sections: dict[str, Section], calls: int) -> dict[str, tuple[float, float, float]]:
    return {
        label: (section.calls / calls, section.ns / calls / 1e3, section.own_ns / calls / 1e3)
        for label, section in sections.items()
    }


def table(result: Result) -> str:
    """The sections in the order in which they first ended, inner before outer."""
    what = f"{result.workload}, {result.way}, {result.regime}"
    lines = [
        f"{what}: {result.host_us:.1f} us of the host, {result.clocked_us:.1f} with clocks",
        f"  {'section':32}  {'calls':>6}  {'us':>9}  {'own us':>9}",
    ]
    lines += [
        f"  {label:32}  {calls:6.1f}  {us:9.2f}  {own:9.2f}" for label, (calls, us, own) in result.sections.items()
    ]
    own = sum(own for _, _, own in result.sections.values())
    lines.append(f"  {'outside of all':32}  {'':6}  {'':9}  {result.clocked_us - own:9.2f}")
    return "\n".join(lines)


def perceptron(device: torch.device) -> Program:
    """Two small layers: host time dominates."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8)).to(device)
    return Program(model, (torch.randn(16, 64, device=device),), context=torch.no_grad, name="MLP")


def perceptron_of_any_batch(device: torch.device) -> Program:
    """Compiled for any batch size, which is then an input."""
    program = perceptron(device)
    torch._dynamo.mark_dynamic(program.args[0], 0)
    return dataclasses.replace(program, name="MLP-N")


def chain(device: torch.device) -> Program:
    """Three graphs in one step, each after the one before."""

    def fn(x: torch.Tensor) -> torch.Tensor:
        x = x.sin() + 1
        torch._dynamo.graph_break()
        x = x @ x.mT
        torch._dynamo.graph_break()
        return x.softmax(0)

    torch.manual_seed(0)
    return Program(fn, (torch.randn(64, 64, device=device),), context=torch.no_grad, name="CHAIN")


def resnet18(device: torch.device) -> Program:
    """A training step; needs torchvision."""
    from torchvision.models import resnet18 as build

    torch.manual_seed(0)
    model = build().to(device)
    return Program(model, (torch.randn(16, 3, 224, 224, device=device),), training=True, name="RESNET18")


PROGRAMS: dict[str, Callable[[torch.device], Program]] = {
    "MLP": perceptron,
    "MLP-N": perceptron_of_any_batch,
    "CHAIN": chain,
    "RESNET18": resnet18,
}


def program_of(name: str) -> Program:
    """One of these programs, or a workload, on the GPU."""
    device = torch.device("cuda")
    return PROGRAMS[name](device) if name in PROGRAMS else resolve(name, device)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", default=["MLP", "BERT-I", "DLRM"], metavar="NAMES")
    parser.add_argument("--recording", action="store_true", help="the recording instead of replays")
    parser.add_argument("--calls", type=int, help="replays (200), or recordings (5)")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if not has_gpu():
        return 2
    found: list[Result] = []
    for name in options.names:
        results = (recordings if options.recording else replays)(
            name, program_of(name), options.calls or (5 if options.recording else 200)
        )
        found += results
        print("\n\n".join(map(table, results)) + "\n", flush=True)
    cost = Clocks().cost_ns()
    print(f"a pair of clocks costs {cost:.0f} ns")
    write_figures(options.out, [asdict(result) for result in found], clock_ns=cost)
    return 0


if __name__ == "__main__":
    sys.exit(main())
