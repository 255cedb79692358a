"""Runs a program in several ways and measures them, in the four stages that README.md describes.

A :class:`Comparison` takes a program and the names of ways, and yields a measurement for each way and regime after each
stage. If a way raises, its measurements carry the error and no figures, and the others continue.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import json
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from pygraph_trees.report.log import journal
from pygraph_trees.report.text import title

from . import inspection, timing
from .kernels import name_events
from .outcome import REGIMES, Measurement
from .program import InputSet, Program, Ring
from .verify import Snapshot, differences, snapshot
from .ways import FORCED, WAYS, Way, make_ways, own_cache, wake_compiler

Progress = Callable[[int, int, str], None]  # gets the steps done, the total and the name of the next step

_SEED = 1234
_MOST_COMPILATIONS = 64  # of one code object in one way


@dataclass(slots=True)
class _Run:
    """The state of one way in one regime."""

    program: Program
    way: Way
    regime: str
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
        effort: timing.Effort | None = None,
        progress: Progress | None = None,
    ) -> None:
        self.program = program
        self.effort = effort or timing.Effort()
        self.ways = make_ways(program, ways)
        self.ring = Ring(program, self.effort.ring)
        feeds = {"same": self.ring.same, "fresh": self.ring.fresh}
        self._runs = [_Run(program, way, regime, feeds[regime]) for way in self.ways for regime in REGIMES]
        self._wait = timing.synchroniser(program.device)
        self._on_gpu = program.device.type == "cuda"
        self._references: dict[str, Snapshot] = {}
        self.traces: dict[str, dict[str, Any]] = {}  # of a call with fresh inputs, by way
        self._progress = progress or (lambda done, total, text: None)
        self._done = 0
        patched = (run for run in self._runs if run.way.patched and self._on_gpu)
        self._choosing = [run for run in patched if run.regime == "fresh" and run.way.name not in FORCED]
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
            for run in timing.schedule(in_turn, self.effort.rounds):
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
        """Compiles and warms up a way, for both regimes."""
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

    def _timed_call(self, run: _Run) -> float:
        return timing.timed_call(run.call, next(run.feed), self._wait)[0]

    def _warm_up(self, run: _Run) -> None:
        if "compile_s" not in run.figures:
            run.figures["compile_s"] = self._timed_call(run)
        durations, recordings = list[float](), list[int]()
        fewest, most = self.effort.warm_calls
        fewest = max(fewest, len(self.ring.sets) + 1)
        while len(durations) < most and not (len(durations) >= fewest and timing.is_steady(durations, recordings)):
            durations.append(self._timed_call(run))
            recordings.append(len(inspection.recordings(run.way.managers)))
        run.steady_s = statistics.median(durations[-timing.STEADY_CALLS :])
        run.figures["record_s"] = max(0.0, sum(durations) - run.steady_s * len(durations))
        self._check(run)

    def _settle(self, run: _Run) -> None:
        timing.call_until_chosen(lambda: self._timed_call(run), run.functions.start)
        self._check(run)

    def _check(self, run: _Run) -> None:
        """Compares the outputs of one call with those of eager and upstream."""
        target = self.ring.sets[0 if run.regime == "same" else 1]
        self.ring.restore(target)
        others = [inputs for inputs in self.ring.sets if inputs is not target and run.regime == "fresh"]
        for storage in itertools.chain.from_iterable(inputs.storages for inputs in others):
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
        block = timing.time_block(run.call, run.feed, calls, self.effort.settle_calls, self._wait)
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
        """One measurement for each way and regime, in the order of the ways."""
        return [self._measurement(run) for run in self._runs]

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


def compare(
    program: Program,
    ways: Sequence[str] = WAYS,
    effort: timing.Effort | None = None,
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
