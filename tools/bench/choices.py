"""Selection against both forced ways, for synthetic functions.

usage: python tools/bench/choices.py [--seconds S] [--seed N] [--jobs N] [--out FILE]

It draws functions and compares each decision with the better of "compile" and "ours:graphed". A fifth of the functions
should run un-graphed. *ratio* uses the function's own time, which varies by a few percent between recordings;
*choice_ratio* uses the time of the way that was chosen.
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[n]) for n in (2, 1)]

import torch

from bench.figures import has_gpu, write_figures
from pygraph_trees.benchmark.measure import collector_off, schedule, synchroniser
from pygraph_trees.benchmark.program import Program, Ring
from pygraph_trees.benchmark.ways import Way, make_ways
from pygraph_trees.report.log import journal

_COMPILED = 2  # calls after which a way is compiled, for sizes that change as well
_DECIDED = 60  # calls after which a way is decided
_ROUNDS, _SETTLE, _CALLS = 7, 5, 30
_FEW = 3  # calls, if each makes a recording
_COPIED_MB = 256.0
KINDS = {"graphed": 80, "copied": 8, "sizes": 12}  # how many of a hundred
_CLOSE = 1.03


@dataclass(frozen=True, slots=True)
class Drawn:
    """A synthetic function."""

    kernels: int
    inputs: int
    megabytes: float  # of all inputs
    host_us: int  # host work before each call
    waits: bool  # whether the program waits after each call
    kind: str = "graphed"  # or "copied", "sizes": its inputs must be copied, or each call has other sizes

    def program(self, device: torch.device) -> Program:
        """Each kernel is a matrix product of its own size, which Inductor does not fuse with others."""
        if self.kind == "copied":
            return self._copied(device)
        rows = max(1, int(self.megabytes * 1e6 / 4 / 256 / self.inputs))
        given = tuple(torch.randn(max(rows, 128), 256, device=device) for _ in range(self.inputs))
        weight = torch.nn.Parameter(torch.randn(256, 16, device=device), requires_grad=False)

        def fn(*given: torch.Tensor) -> list[torch.Tensor]:
            found = []
            for number in range(self.kernels):
                x = given[number % len(given)]
                found.append(x[: 64 + number] @ weight if number >= len(given) else x @ weight)
            return found

        return Program(fn, given, context=torch.no_grad, name="drawn")

    def _copied(self, device: torch.device) -> Program:
        """The kernel of a custom operator hides the address of its input, which a graph therefore copies."""
        sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "test" / "gpu"))
        from hidden_operators import halves

        x = torch.randn(int(self.megabytes * 1e6 / 4), device=device)
        return Program(lambda x: [halves(x) for _ in range(self.kernels)], (x,), context=torch.no_grad, name="drawn")

    def feed(self, ring: Ring) -> Iterator[tuple[Any, ...]]:
        """The arguments of each call: at new addresses, or of sizes that never come again."""
        for number, own in enumerate(ring.fresh):
            yield tuple(x[: len(x) - number] for x in own.args) if self.kind == "sizes" else own.args


def draw(generator: random.Random) -> Drawn:
    kind = generator.choices(list(KINDS), list(KINDS.values()))[0]
    if kind == "copied":
        return Drawn(generator.randint(1, 2), 1, _COPIED_MB, 0, generator.random() < 0.5, kind)
    if kind == "sizes":  # enough rows for all calls
        return Drawn(generator.randint(2, 16), generator.randint(1, 2), 16.0, 0, generator.random() < 0.5, kind)
    kernels = round(2 ** generator.uniform(0, 6))
    return Drawn(
        kernels=kernels,
        inputs=generator.randint(1, min(8, kernels)),
        megabytes=generator.choice((0.0, 0.1, 1.0, 4.0, 16.0, 64.0)),
        host_us=generator.choice((0, 0, 20, 100)),
        waits=generator.random() < 0.5,
    )


def spin(host_us: int) -> None:
    end = time.perf_counter_ns() + host_us * 1000
    while time.perf_counter_ns() < end:
        pass


def step_us(drawn: Drawn, program: Program, way: Way, feed: Iterator[tuple[Any, ...]], calls: int) -> float:
    """The mean time of a call in a loop, with the function's host work."""
    wait = synchroniser(program.device)
    wait()
    begin = time.perf_counter_ns()
    for _ in range(calls):
        spin(drawn.host_us)
        program.step(way.callable, next(feed), {})
        if drawn.waits:
            wait()
    wait()
    return (time.perf_counter_ns() - begin) / 1e3 / calls


_turn: AbstractContextManager[Any] = nullcontext()  # held while a function is timed


def _take_turns(lock: AbstractContextManager[Any]) -> None:
    global _turn
    _turn = lock


def grid(seconds: float, seed: int, jobs: int) -> Iterator[dict[str, Any]]:
    """A record for each function that is begun within ``seconds``, in the order of their seeds."""
    context, seeds = multiprocessing.get_context("spawn"), range(seed * 1000, (seed + 1) * 1000)
    with ProcessPoolExecutor(jobs, context, _take_turns, (context.Lock(),)) as workers:
        yield from filter(None, workers.map(partial(_drawn, time.monotonic() + seconds), seeds))


def _drawn(end: float, seed: int) -> dict[str, Any] | None:
    if time.monotonic() >= end:
        return None
    return _measured(draw(random.Random(seed)), torch.device("cuda", 0))


def _measured(drawn: Drawn, device: torch.device) -> dict[str, Any]:
    torch._dynamo.reset()
    program = drawn.program(device)
    ways, feed = make_ways(program, ["compile", "ours:graphed", "ours"]), drawn.feed(Ring(program, 4))
    found: dict[str, list[float]] = {way.name: [] for way in ways}
    few = {"ours:graphed"} if drawn.kind == "sizes" else set[str]()
    for way in ways:
        with way.active():
            step_us(drawn, program, way, feed, _COMPILED)
    with _turn:
        for way in ways:
            with way.active():
                step_us(drawn, program, way, feed, _FEW if way.name in few else _DECIDED)
        log = journal.records()[1][-1]
        for way in schedule(ways, _ROUNDS):
            with way.active(), collector_off():
                step_us(drawn, program, way, feed, _FEW if way.name in few else _SETTLE)
                found[way.name].append(step_us(drawn, program, way, feed, _FEW if way.name in few else _CALLS))
    times = {name: median(values) for name, values in found.items()}
    ratios = ratios_of(times, is_graphed=log.ungraphed_reason is None)
    print(f"{ratios['choice_ratio']:6.3f} {ratios['ratio']:6.3f}  {drawn}  {log.decision}", flush=True)
    by_way = {f"{name}_us": value for name, value in times.items()}
    return {**asdict(drawn), **by_way, **ratios, "decision": log.decision, "trial_calls": log.trial_calls}


def ratios_of(times: Mapping[str, float], *, is_graphed: bool) -> dict[str, float]:
    """The ratios of the function's time, and of the time of the forced way that it goes, to the better forced way's."""
    best = min(times["compile"], times["ours:graphed"])
    return {"ratio": times["ours"] / best, "choice_ratio": times["ours:graphed" if is_graphed else "compile"] / best}


def summary_of(records: Sequence[Mapping[str, Any]]) -> str:
    """How many functions go the better forced way, and are as fast as it, each within 3%; which way that is; trials."""
    chosen, own = ([record[name] for record in records] for name in ("choice_ratio", "ratio"))
    within, as_fast = (sum(ratio <= _CLOSE for ratio in ratios) for ratios in (chosen, own))
    ungraphed = sum(record["compile_us"] < record["ours:graphed_us"] for record in records)
    trials = sum(record["trial_calls"] > 0 for record in records)
    return (
        f"{within} of {len(records)} functions go a way within 3% of the better forced one, which is un-graphed for "
        f"{ungraphed}; {trials} were measured; "
        f"{as_fast} are within 3% of its time, {sum(ratio < 1 / _CLOSE for ratio in own)} faster by more than that"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=300.0, help="(default 300)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=4, help="processes (default 4)")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if not has_gpu():
        return 2
    results: list[dict[str, Any]] = []
    for record in grid(options.seconds, options.seed, options.jobs):
        results.append(record)
        write_figures(options.out, results, seed=options.seed, rounds=_ROUNDS, calls=_CALLS)
    if results:
        print(summary_of(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
