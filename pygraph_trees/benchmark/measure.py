"""Runs a program in several ways and measures them; README.md has the four stages, the protocols and the clocks.

A :class:`Comparison` takes a program and the names of ways, and yields a measurement for each way and regime after each
stage. If a way raises, its measurements carry the error and no figures, and the others continue. The garbage collector
is off while a clock runs, and a call's outputs are dropped before the next call.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from pygraph_trees.indirection.route_rule import REPLAYS
from pygraph_trees.report.log import journal
from pygraph_trees.report.text import title
from pygraph_trees.trees.pools.collector import paused

from . import inspection
from .kernels import name_events
from .outcome import REGIMES, Measurement
from .program import InputSet, Program, Ring
from .verify import Snapshot, differences, snapshot
from .ways import WAYS, Way, make_ways, own_cache, wake_compiler

Progress = Callable[[int, int, str], None]  # gets the steps done, the total and the name of the next step
T = TypeVar("T")

STEADY_CALLS = 4
CALLS = 2 * REPLAYS  # calls with new addresses, within which a route is chosen
_MOST_S = 3.0  # limit of the time, for programs with long calls
_AWAITED_S = 60.0  # time in which a chosen table has to be in use
_SEED = 1234
_MOST_COMPILATIONS = 64  # of one code object in one way


@dataclass(frozen=True, slots=True)
class Effort:
    """The amount of measurement. More rounds and longer blocks give steadier figures."""

    rounds: int = 7
    block_s: float = 0.2  # duration of one block of calls
    calls: tuple[int, int] = (10, 200)  # fewest and most calls in a block
    settle_calls: int = 3  # un-timed calls at the start of each block
    warm_calls: tuple[int, int] = (8, 40)  # fewest and most calls until a way counts as steady
    ring: int = 8  # sets of inputs in the "fresh" regime
    fresh_caches: bool = True  # each way compiles for itself; only choices found by benchmark are shared
    inspect: bool = True  # profile, count recordings and memory, after the timing

    def block_calls(self, steady_s: float) -> int:
        """The number of calls in a block, given the time of one."""
        fewest, most = self.calls
        return max(fewest, min(most, round(self.block_s / max(steady_s, 1e-9))))


@dataclass(slots=True)
class _Run:
    program: Program
    way: Way
    regime: str  # in which the way runs
    feed: Iterator[InputSet]
    error: str | None = None
    steady_s: float = 0.0
    figures: dict[str, Any] = field(default_factory=dict)  # fields of the measurement
    samples: dict[str, list[float]] = field(default_factory=dict)  # by figure: one for each round
    functions: range = range(0)  # in the report

    def call(self, inputs: InputSet) -> Any:
        return self.program.step(self.way.callable, inputs.args, inputs.kwargs)


class Comparison:
    """One program in several ways; :meth:`stages` may be called once."""

    def __init__(
        self,
        program: Program,
        ways: Sequence[str] = WAYS,
        effort: Effort | None = None,
        progress: Progress | None = None,
    ) -> None:
        self.program = program
        self.effort = effort or Effort()
        self.ways = make_ways(program, ways)
        self.ring = Ring(program, self.effort.ring)
        self._runs = [_Run(program, way, regime, getattr(self.ring, regime)) for way in self.ways for regime in REGIMES]
        self._wait = synchroniser(program.device)
        self._on_gpu = program.device.type == "cuda"
        self._references: dict[str, Snapshot] = {}
        self.traces: dict[str, dict[str, Any]] = {}  # of a call with fresh inputs, by way
        self._progress = progress or (lambda done, total, text: None)
        self._done = 0
        fresh = (run for run in self._runs if run.regime == "fresh" and run.way.patched and self._on_gpu)
        self._choosing = [run for run in fresh if "triton.pygraph_indirection" not in run.way.flags]
        self._total = len(self._runs) * (1 + self.effort.rounds + self.effort.inspect) + len(self._choosing)

    def stages(self) -> Iterator[tuple[str, list[Measurement]]]:
        """Runs all stages and yields the measurements so far. At "prepared", all ways are warm, and none is timed."""
        # All ways run the same code objects, and Dynamo limits the compilations of each: each way needs its share.
        limit = max(_MOST_COMPILATIONS, torch._dynamo.config.recompile_limit) * len(self.ways)
        temporary = tempfile.TemporaryDirectory(prefix="pygraph_", ignore_cleanup_errors=True)
        with torch._dynamo.config.patch(recompile_limit=limit), temporary as folder:
            cache = functools.partial(own_cache, Path(folder)) if self.effort.fresh_caches else contextlib.nullcontext
            if any(way.name != "eager" for way in self.ways):
                with cache():
                    wake_compiler(self.program.device)
            for way in self.ways:
                with cache():
                    self._prepare([run for run in self._runs if run.way is way])
                yield "prepared" if way is self.ways[-1] else "preparing", self._measurements()
            for run in self._choosing:
                with cache():
                    self._turn(run, "settling", self._settle)
            yield "settled", self._measurements()
            self._references.clear()
            in_turn = sorted(self._runs, key=lambda run: run.regime, reverse=True)  # ways alternate, not regimes
            for run in schedule(in_turn, self.effort.rounds):
                self._turn(run, "timing", self._time)
            yield "timed", self._measurements()
            for run in self._runs if self.effort.inspect else ():
                self._turn(run, "inspecting", self._inspect)
            yield "inspected", self._measurements()

    def _turn(self, run: _Run, what: str, do: Callable[[_Run], None]) -> None:
        """Does one step of a run inside its way, unless it has failed before; notes an exception as its failure."""
        self._progress(self._done, self._total, f"{what} {run.way.name}, {run.regime} inputs")
        self._done += 1
        if run.error is None:
            try:
                with run.way.active():
                    do(run)
            except Exception as error:
                run.error = f"{type(error).__name__}: {error}"[:2000]
        for inputs in self.ring.sets:
            self.program.clear_gradients(inputs.args, inputs.kwargs)
        if self._done == self._total:
            self._progress(self._total, self._total, "done")

    def _prepare(self, runs: Sequence[_Run]) -> None:
        (first, second), functions = runs, len(journal.functions)
        self._turn(first, "compiling", self._warm_up)
        if "compile_s" in first.figures:
            second.figures["compile_s"] = first.figures["compile_s"]
        else:
            second.error = first.error
        self._turn(second, "warming up", self._warm_up)
        if first.error or second.error:
            gc.collect()
            if self._on_gpu:
                torch.cuda.empty_cache()
        first.functions = second.functions = range(functions, len(journal.functions))

    def _warm_up(self, run: _Run) -> None:
        if "compile_s" not in run.figures:
            run.figures["compile_s"], _ = timed_call(run.call, next(run.feed), self._wait)
        durations, recordings = list[float](), list[int]()
        fewest, most = self.effort.warm_calls
        fewest = max(fewest, len(self.ring.sets) + 1)
        while len(durations) < most and not (len(durations) >= fewest and is_steady(durations, recordings)):
            durations.append(timed_call(run.call, next(run.feed), self._wait)[0])
            recordings.append(len(inspection.recordings(run.way.managers)))
        run.steady_s = statistics.median(durations[-STEADY_CALLS:])
        run.figures["record_s"] = max(0.0, sum(durations) - run.steady_s * len(durations))
        self._check(run)

    def _settle(self, run: _Run) -> None:
        call_until_chosen(lambda: timed_call(run.call, next(run.feed), self._wait), run.functions.start)
        self._check(run)

    def _check(self, run: _Run) -> None:
        """Compares the outputs of one call with those of eager and upstream."""
        target = self.ring.sets[0 if run.regime == "same" else 1]
        self.ring.restore(target)
        for inputs in self.ring.sets if run.regime == "fresh" else ():
            for storage in inputs.storages if inputs is not target else ():
                storage.fill_(0)  # which reveals a program that still reads another set
        torch.manual_seed(_SEED)
        outputs = snapshot(run.call(target))
        for inputs in self.ring.sets:
            self.ring.restore(inputs)
        for name, figure in (("eager", "max_diff"), ("upstream", "max_diff_upstream")):
            if name == run.way.name and run.regime == "same":
                self._references[name] = outputs
            if name not in self._references:
                continue
            run.figures[figure] = 0.0
            for _, apart in differences(outputs, self._references[name]):
                if isinstance(apart, str):
                    run.error = f"outputs differ from those of {name}: {apart}"
                    break
                run.figures[figure] = max(run.figures[figure], apart)

    def _time(self, run: _Run) -> None:
        calls = run.figures["calls"] = self.effort.block_calls(run.steady_s)
        block = time_block(run.call, run.feed, calls, self.effort.settle_calls, self._wait)
        for name, value in block.items():
            run.samples.setdefault(name, []).append(value)

    def _inspect(self, run: _Run) -> None:
        if not self._on_gpu:
            return
        managers = run.way.managers
        for _ in range(self.effort.settle_calls):
            run.call(next(run.feed))
        before = inspection.copied_for_one_call(managers)
        with inspection.watch_replays(managers) as replays:
            run.call(next(run.feed))
            self._wait()
        copied_bytes = sum(inspection.copied_nbytes(node) * count for node, count in replays.items())
        run.figures |= {
            "copied_bytes": copied_bytes + inspection.copied_for_one_call(managers) - before,
            "recordings": len(inspection.recordings(managers)),
            "pool_bytes": inspection.pool_nbytes(managers),
            "peak_bytes": self._peak_nbytes(run),
        }

        def call() -> list[str]:
            with inspection.watch_replays(managers) as watched:
                run.call(next(run.feed))
            return inspection.launched(watched)

        figures, trace = inspection.profile_call(call, self._wait)
        run.figures |= figures
        if run.regime == "fresh":
            if run.way.patched:
                name_events(trace["traceEvents"], journal.functions[run.functions.start : run.functions.stop])
            self.traces[run.way.name] = trace

    def _peak_nbytes(self, run: _Run) -> int:
        """Resident tensors, the reserved graph pools, and the peak of one call's allocations outside of them."""
        device, managers, inputs = self.program.device, run.way.managers, next(run.feed)
        self.program.clear_gradients(inputs.args, inputs.kwargs)
        self._wait()
        pooled = inspection.pool_nbytes(managers, allocated=True)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        outputs = run.call(inputs)
        self._wait()
        grown = torch.cuda.max_memory_allocated(device) - before
        pooled = inspection.pool_nbytes(managers, allocated=True) - pooled
        del outputs
        temporaries = max(0, grown - max(0, pooled))
        return self.program.resident_nbytes + inspection.pool_nbytes(managers) + temporaries

    def _measurements(self) -> list[Measurement]:
        return list(map(self._measurement, self._runs))

    def _measurement(self, run: _Run) -> Measurement:
        program, samples = self.program, {name: tuple(values) for name, values in run.samples.items()}
        found = Measurement(program.name, program.mode, program.batch, run.way.name, run.regime, samples=samples)
        if run.error is not None:
            return found.failed(run.error)
        medians: dict[str, Any] = {name: statistics.median(values) for name, values in samples.items()}
        ring = 1 if run.regime == "same" else len(self.ring.sets)
        functions = journal.records()[1][run.functions.start : run.functions.stop]
        routes = [f"{title(f)}, {f.mode}: {f.route}" for f in functions if f.route is not None]
        return replace(found, ring=ring, routes=routes, **medians, **run.figures)


def synchroniser(device: torch.device) -> Callable[[], None]:
    """Waits for all work on ``device``; does nothing for the CPU."""
    return functools.partial(torch.cuda.synchronize, device) if device.type == "cuda" else lambda: None


@contextlib.contextmanager
def collector_off() -> Iterator[None]:
    """Collects garbage now, and not while the block runs."""
    gc.collect()
    with paused():
        yield


def timed_call(call: Callable[[T], object], inputs: T, wait: Callable[[], None]) -> tuple[float, float]:
    """Seconds until one call is done, and until it returns, with the GPU idle before it."""
    clock = time.perf_counter_ns
    wait()
    start = clock()
    call(inputs)
    returned = clock()
    wait()
    return (clock() - start) * 1e-9, (returned - start) * 1e-9


def time_block(
    call: Callable[[T], object], inputs: Iterator[T], calls: int, settle: int, wait: Callable[[], None]
) -> dict[str, float]:
    """Makes ``settle`` un-timed, ``calls`` synchronised and ``calls`` streamed calls; gives a measurement's figures."""

    def stream(given: Iterable[T]) -> None:
        for each in given:
            call(each)

    feed = [next(inputs) for _ in range(settle + 2 * calls)]
    stream(feed[:settle])
    with collector_off():
        latency_s, host_s = zip(*(timed_call(call, each, wait) for each in feed[settle : settle + calls]), strict=True)
        streamed_s, _ = timed_call(stream, feed[settle + calls :], wait)
    return {
        "latency_ms": statistics.median(latency_s) * 1e3,
        "latency_p90_ms": statistics.quantiles(latency_s, n=10, method="inclusive")[-1] * 1e3,
        "throughput_ms": streamed_s / calls * 1e3,
        "host_us": statistics.median(host_s) * 1e6,
    }


def schedule(items: Sequence[T], rounds: int) -> list[T]:
    """Each item once a round; every second round reverses the one before, and each pair starts one item later."""
    order: list[T] = []
    for number in range(rounds):
        start = number // 2 % len(items) if items else 0
        turn = [*items[start:], *items[:start]]
        order += reversed(turn) if number % 2 else turn
    return order


def is_steady(durations: Sequence[float], recordings: Sequence[int]) -> bool:
    """Whether the last calls took about the same time and recorded nothing, given the recordings after each call."""
    if len(durations) <= STEADY_CALLS:
        return False
    usual = statistics.median(durations[-2 * STEADY_CALLS :])
    quiet = len(set(recordings[-STEADY_CALLS - 1 :])) == 1
    return quiet and all(d <= 1.25 * usual for d in durations[-STEADY_CALLS:])


def call_until_chosen(call: Callable[[], Any], first: int, share: float = 1.0) -> None:
    """Calls a program until the routes of its inputs are chosen and in use, within a limit of calls and time.

    ``first``: the number of its first function in the report; ``share``: of the calls whose inputs move, 0 if none do.
    """
    calls = CALLS / share if share else CALLS
    began = time.monotonic()
    for number in itertools.count(1):
        call()
        spent_s = time.monotonic() - began
        is_long_enough = spent_s >= _MOST_S or (number >= calls and number % REPLAYS == 0)
        if is_long_enough and (spent_s >= _AWAITED_S or not any(f.awaits_table for f in journal.functions[first:])):
            return


def compare(
    program: Program,
    ways: Sequence[str] = WAYS,
    effort: Effort | None = None,
    progress: Progress | None = None,
    trace: Path | None = None,
) -> list[Measurement]:
    """Measures ``program`` in the named ways, with inputs that stay and with inputs at fresh addresses.

    ``trace``: the file for a trace of one later call in each way, with fresh inputs, in which ours names its kernels.
    """
    comparison = Comparison(program, ways, effort, progress)
    *_, (_, found) = comparison.stages()
    if trace is not None:
        trace.write_text(json.dumps(inspection.side_by_side(comparison.traces)), encoding="utf-8")
    return found
