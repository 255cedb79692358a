"""Runs a program in several ways and measures them, in four stages with a checkpoint after each.

*Prepare* compiles each way, warms it up until it is steady and compares its outputs with eager's. *Settle* waits until
each way has chosen how its inputs are given. *Time* runs rounds of interleaved blocks. *Inspect* profiles one call and
counts recordings, copies and memory. If a way raises, its measurements carry the error and no figures, and the others
continue.
"""

from __future__ import annotations

import contextlib
import gc
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from . import graphs
from .differences import Snapshot, difference, snapshot
from .measurement import REGIMES, Measurement
from .program import Program
from .rings import InputSet, Ring
from .settling import call_until_chosen, functions_so_far, routes_of
from .timing import Effort, is_steady, schedule, synchroniser, time_block, timed_call
from .trace import profile_call
from .tuning import own_cache
from .ways import FORCED, WAYS, Way, make_ways, wake_compiler

Progress = Callable[[int, int, str], None]
Checkpoint = Callable[[list[Measurement]], None]

_SEED = 1234
_STEADY_WINDOW = 4
_MOST_COMPILATIONS = 64  # of one code object in one way


@dataclass(slots=True)
class _Run:
    """The state of one way in one regime."""

    way: Way
    regime: str
    error: str | None = None
    steady_s: float = 0.0
    figures: dict[str, Any] = field(default_factory=dict)  # fields of the measurement
    samples: dict[str, list[float]] = field(default_factory=dict)  # by figure: one for each round
    functions: slice = field(default_factory=lambda: slice(0))  # in the report


class Comparison:
    """One program in several ways; :meth:`run` runs all stages and may be called once.

    :param progress: called with the steps done, the total and the name of the next step
    """

    def __init__(
        self,
        program: Program,
        ways: Sequence[str] = WAYS,
        effort: Effort | None = None,
        progress: Progress | None = None,
    ) -> None:
        self.program = program
        self.effort = effort if effort is not None else Effort()
        self.ways = make_ways(program, ways)
        self.ring = Ring(program, self.effort.ring)
        self._runs = [_Run(way, regime) for way in self.ways for regime in REGIMES]
        self._wait = synchroniser(program.device)
        self._on_gpu = program.device.type == "cuda"
        self._references: dict[str, Snapshot] = {}
        self._progress = progress
        self._done = 0
        self._choosing = [
            run
            for run in self._runs
            if run.way.patched and run.way.name not in FORCED and run.regime == "fresh" and self._on_gpu
        ]
        self._total = len(self._runs) * (1 + self.effort.rounds + self.effort.inspect) + len(self._choosing)

    def run(
        self, checkpoint: Checkpoint | None = None, prepared: Callable[[], None] | None = None
    ) -> list[Measurement]:
        """Runs all stages.

        Args:
            checkpoint: called with the measurements so far.
            prepared: called once, when every way is compiled and warm and nothing is timed yet.
        """
        # All ways run the same code objects, and Dynamo limits the compilations of each: each way needs its share.
        limit = max(_MOST_COMPILATIONS, torch._dynamo.config.recompile_limit) * len(self.ways)
        with torch._dynamo.config.patch(recompile_limit=limit), _caches(self.effort.fresh_caches) as cache:
            if any(way.compiled for way in self.ways):
                with cache():
                    wake_compiler(self.program.device)
            for way in self.ways:
                with cache():
                    self._prepare(way)
                self._report(checkpoint)
            if prepared is not None:
                prepared()
            for run in self._choosing:
                with cache():
                    self._settle(run)
            self._report(checkpoint)
            self._references.clear()
            in_turn = sorted(self._runs, key=lambda run: run.regime, reverse=True)  # ways alternate, not regimes
            for run in schedule(in_turn, self.effort.rounds):
                self._time(run)
            self._report(checkpoint)
            if self.effort.inspect:
                for run in self._runs:
                    self._inspect(run)
                self._report(checkpoint)
        return self._measurements()

    def _measurements(self) -> list[Measurement]:
        """One measurement for each way and regime, in the order of the ways."""
        return [self._measurement(run) for run in self._runs]

    def _report(self, checkpoint: Checkpoint | None) -> None:
        if checkpoint is not None:
            checkpoint(self._measurements())

    @contextlib.contextmanager
    def _turn(self, run: _Run, what: str) -> Iterator[bool]:
        """Enters a run's way: yields False if the run has failed before, and notes an exception as its failure."""
        if self._progress is not None:
            self._progress(self._done, self._total, f"{what} {run.way.name}, {run.regime} inputs")
        self._done += 1
        try:
            with run.way.active():
                yield run.error is None
        except Exception as error:
            run.error = f"{type(error).__name__}: {error}"[:2000]
        for inputs in self.ring.sets:
            self.program.clear_gradients(inputs.args, inputs.kwargs)
        if self._progress is not None and self._done == self._total:
            self._progress(self._total, self._total, "done")

    def _step(self, way: Way) -> Callable[[InputSet], Any]:
        step, fn = self.program.step, way.callable
        return lambda inputs: step(fn, inputs.args, inputs.kwargs)

    def _feed(self, run: _Run) -> Iterator[InputSet]:
        return self.ring.same() if run.regime == "same" else self.ring.fresh()

    def _prepare(self, way: Way) -> None:
        runs = [run for run in self._runs if run.way is way]
        first = functions_so_far()
        for number, run in enumerate(runs):
            if number and "compile_s" not in runs[0].figures:
                run.error = runs[0].error
            with self._turn(run, "compiling" if number == 0 else "warming up") as going:
                if going:
                    self._warm_up(run, runs[0].figures.get("compile_s"))
                    self._check(run)
            if run.error is not None:
                gc.collect()
                if self._on_gpu:
                    torch.cuda.empty_cache()
        for run in runs:
            run.functions = slice(first, functions_so_far())

    def _warm_up(self, run: _Run, compile_s: float | None) -> None:
        step, feed, managers = self._step(run.way), self._feed(run), lambda: run.way.managers
        if compile_s is None:
            compile_s, _ = timed_call(step, next(feed), self._wait)
        run.figures["compile_s"] = compile_s
        durations: list[float] = []
        recordings: list[int] = []
        fewest, most = self.effort.warm_calls
        fewest = max(fewest, len(self.ring) + 1)
        while len(durations) < most and not (len(durations) >= fewest and is_steady(durations, recordings)):
            durations.append(timed_call(step, next(feed), self._wait)[0])
            recordings.append(len(graphs.recordings(managers())))
        run.steady_s = statistics.median(durations[-_STEADY_WINDOW:])
        run.figures["record_s"] = max(0.0, sum(durations) - run.steady_s * len(durations))

    def _settle(self, run: _Run) -> None:
        with self._turn(run, "settling") as going:
            if going:
                step, feed = self._step(run.way), self._feed(run)
                call_until_chosen(lambda: timed_call(step, next(feed), self._wait), run.functions.start)
                self._check(run)

    def _check(self, run: _Run) -> None:
        """Compares the outputs of one call with those of eager and upstream."""
        target = self.ring.sets[0 if run.regime == "same" else 1]
        for inputs in self.ring.sets:
            if inputs is target:
                self.ring.restore(inputs)
            elif run.regime == "fresh":
                self.ring.blank(inputs)
        torch.manual_seed(_SEED)
        outputs = snapshot(self._step(run.way)(target))
        for inputs in self.ring.sets:
            self.ring.restore(inputs)
        for name in ("eager", "upstream"):
            if name == run.way.name and run.regime == "same":
                self._references[name] = outputs
            if name not in self._references:
                continue
            found = difference(outputs, self._references[name])
            if found.problem is not None:
                run.error = f"outputs differ from those of {name}: {found.problem}"
            else:
                run.figures["max_diff" if name == "eager" else "max_diff_upstream"] = found.largest

    def _time(self, run: _Run) -> None:
        with self._turn(run, "timing") as going:
            if not going:
                return
            calls = run.figures["calls"] = self.effort.block_calls(run.steady_s)
            block = time_block(self._step(run.way), self._feed(run), calls, self.effort.settle_calls, self._wait)
            for name, value in (
                ("latency_ms", statistics.median(block.latency_s) * 1e3),
                ("latency_p90_ms", _p90(block.latency_s) * 1e3),
                ("throughput_ms", block.throughput_s * 1e3),
                ("host_us", statistics.median(block.host_s) * 1e6),
            ):
                run.samples.setdefault(name, []).append(value)

    def _inspect(self, run: _Run) -> None:
        with self._turn(run, "inspecting") as going:
            if not going or not self._on_gpu:
                return
            step, feed, managers = self._step(run.way), self._feed(run), run.way.managers
            for _ in range(self.effort.settle_calls):
                step(next(feed))
            before = graphs.copied_for_one_call(managers)
            with graphs.watch_replays(managers) as replays:
                step(next(feed))
                self._wait()
            copied_bytes = sum(graphs.copied_nbytes(node) * count for node, count in replays.items())
            run.figures |= {
                "copied_bytes": copied_bytes + graphs.copied_for_one_call(managers) - before,
                "recordings": len(graphs.recordings(managers)),
                "pool_bytes": graphs.pool_nbytes(managers),
                "peak_bytes": self._peak_nbytes(run),
            }
            with graphs.watch_replays(managers) as replays:
                work = profile_call(lambda: step(next(feed)), self._wait)
            if work is not None:
                launches = graphs.launched(replays)
                run.figures |= {
                    "gpu_ms": work.graph_ms,
                    "gpu_total_ms": work.total_ms,
                    "kernels_graphed": work.kernels_graphed,
                    "kernels_total": work.kernels_total,
                    "timeline": work.timeline,
                    "launches": tuple(launches) if work.graph_launches == len(launches) else (),
                }

    def _peak_nbytes(self, run: _Run) -> int:
        """Resident tensors, the reserved graph pools, and the peak of one call's allocations outside of them."""
        device, managers, inputs = self.program.device, run.way.managers, next(self._feed(run))
        self.program.clear_gradients(inputs.args, inputs.kwargs)
        self._wait()
        pooled = graphs.pool_nbytes(managers, allocated=True)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        outputs = self._step(run.way)(inputs)
        self._wait()
        grown = torch.cuda.max_memory_allocated(device) - before
        pooled = graphs.pool_nbytes(managers, allocated=True) - pooled
        del outputs
        temporaries = max(0, grown - max(0, pooled))
        return self.program.resident_nbytes + graphs.pool_nbytes(managers) + temporaries

    def _measurement(self, run: _Run) -> Measurement:
        program = self.program
        medians: dict[str, Any] = {name: statistics.median(values) for name, values in run.samples.items()}
        measurement = Measurement(
            workload=program.name,
            mode=program.mode,
            batch=program.batch,
            way=run.way.name,
            regime=run.regime,
            ring=1 if run.regime == "same" else len(self.ring),
            routes=routes_of(run.functions),
            samples={name: tuple(values) for name, values in run.samples.items()},
            **medians,
            **run.figures,
        )
        return measurement if run.error is None else measurement.failed(run.error)


def compare(
    program: Program,
    ways: Sequence[str] = WAYS,
    effort: Effort | None = None,
    progress: Progress | None = None,
    checkpoint: Checkpoint | None = None,
    prepared: Callable[[], None] | None = None,
) -> list[Measurement]:
    """Measures ``program`` in the named ways, with inputs that stay and with inputs at fresh addresses."""
    return Comparison(program, ways, effort, progress).run(checkpoint, prepared)


@contextlib.contextmanager
def _caches(fresh: bool) -> Iterator[Callable[[], AbstractContextManager[Any]]]:
    """Yields a factory of contexts with separate compiler caches, whose files stay until this context ends."""
    if not fresh:
        yield contextlib.nullcontext
        return
    with tempfile.TemporaryDirectory(prefix="pygraph_", ignore_cleanup_errors=True) as folder:
        yield lambda: own_cache(Path(folder))


def _p90(values: Sequence[float]) -> float:
    return statistics.quantiles(values, n=10, method="inclusive")[-1] if len(values) > 1 else values[0]
