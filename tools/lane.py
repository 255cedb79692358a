#!/usr/bin/env python3
"""Runs test files, each in a process of its own, and prints a line for each as it ends.

usage: tools/lane.py [--jobs N] [FILE ...]     default: all of test/, as many at a time as there are cores, 4 at most

The processes are forks of this one, which has compiled a program. Tests start others as forks too (tools/forks), whose
processor time is not counted. The slowest files start first. All files of test/gpu share one process: without a GPU
they are skipped, with one `tools/gpu_suite` is the tool for them. The output of files that fail comes last, then the
totals; the exit status is 1 if anything failed. An interrupt ends all processes.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import math
import multiprocessing
import multiprocessing.connection
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING, cast

import processes

if TYPE_CHECKING:
    import pytest

ROOT = Path(__file__).resolve().parent.parent
MOST_JOBS = 4
# Files of test/cpu that take longer than their size suggests, the slowest first; the others follow by size.
SLOWEST = (
    *("placement_graphs", "import", "backward_edges", "direct_calls", "build", "variants", "constants", "commands"),
    *("structured_traces", "newer_torch", "fuzz", "bench", "counting", "caches", "backward_meanwhile", "launches"),
    *("table_builds", "benchmark", "flags", "saved_tensors", "patches"),
)
PRELOADED = ("torch", "torch._inductor.compile_fx", "torch.testing._internal.common_utils")
KINDS = ("passed", "failed", "error", "skipped", "xfailed", "xpassed")


@dataclass(frozen=True, slots=True)
class Job:
    """Test files that share a process."""

    label: str
    files: Sequence[Path]
    arguments: Sequence[str] = ()  # for pytest
    environment: Mapping[str, str] = field(default_factory=dict)
    timeout_s: float = math.inf


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a job."""

    job: Job
    counts: Mapping[str, int]  # by kind of outcome
    failures: Sequence[str]  # names of tests
    seconds: float
    output: str
    status: int  # exit status of the process; negative: the signal that ended it
    cpu_s: float = math.nan  # processor time of the process and of those it has waited for

    def __str__(self) -> str:
        return f"{self.job.label}: {described(self.counts)} in {self.duration}"

    @property
    def duration(self) -> str:
        """The duration of the process in words, with its processor time if known."""
        cpu = "" if math.isnan(self.cpu_s) else f" ({self.cpu_s:.0f} s of processors)"
        return f"{self.seconds:.0f} s{cpu}"


def described(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in counts.items() if count) or "no tests"


class _Reporter:
    """A pytest plugin that writes how many tests had which outcome, which ones failed, and the processor time."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        stats = terminalreporter.stats
        counts = {kind: len(stats.get(kind, ())) for kind in KINDS}
        failures = [report.nodeid for kind in ("failed", "error") for report in stats.get(kind, ())]
        cpu_s = sum(os.times()[:4])
        self._path.write_text(json.dumps([counts, failures, cpu_s]), encoding="utf-8")


class _Running:
    """The process of a job: a fork in a session of its own."""

    def __init__(self, job: Job, folder: Path) -> None:
        self._job = job
        self._log, self._report = folder / "output", folder / "report"
        self._start = time.monotonic()
        fork = multiprocessing.get_context("fork")
        self._process: BaseProcess = fork.Process(target=self._run)
        self._process.start()

    def __str__(self) -> str:
        """How long it has been running, and what it printed last."""
        lines = self._log.read_text(encoding="utf-8", errors="replace").splitlines()[-60:] if self._log.exists() else []
        return "\n".join([f"{self._job.label}: was running for {time.monotonic() - self._start:.0f} s", *lines])

    @property
    def sentinel(self) -> int:
        return self._process.sentinel

    @property
    def left_s(self) -> float:
        """Seconds until the job has taken too long."""
        return self._start + self._job.timeout_s - time.monotonic()

    def _run(self) -> None:
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)  # shells start background jobs without it
        log = os.open(self._log, os.O_WRONLY | os.O_CREAT)
        for stream in (sys.stdout, sys.stderr):
            os.dup2(log, stream.fileno())
        os.environ.update(self._job.environment)
        sys.argv[1:] = files = [str(file) for file in self._job.files]
        # The logging plugin stores torch's structured traces, which is slow and looks like a leak to endurance tests.
        arguments = ["-q", "-p", "no:cacheprovider", "-p", "no:logging", *self._job.arguments, *files]
        pytest = importlib.import_module("pytest")
        sys.exit(int(pytest.main(arguments, plugins=[_Reporter(self._report)])))

    def end(self) -> None:
        """Ends the process and everything that it has started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid or 0, signal.SIGKILL)
        self._process.kill()  # if its session has not begun yet
        self._process.join()

    def outcome(self) -> Outcome:
        seconds, is_late = time.monotonic() - self._start, self.left_s <= 0
        self.end()
        status = self._process.exitcode or 0
        text = self._report.read_text(encoding="utf-8") if self._report.exists() else "[{}, [], NaN]"
        counts, failures, cpu_s = json.loads(text)
        output = self._log.read_text(encoding="utf-8", errors="replace")
        if status not in (0, 1):
            why = f"no end after {seconds:.0f} s" if is_late else f"the process ended with {processes.cause_of(status)}"
            counts |= {"died": 1}
            failures.append(f"{self._job.label}: {why}")
            output += f"\n{why}\n"
        return Outcome(self._job, counts, failures, seconds, output, status, cpu_s)


def run(
    jobs: Iterable[Job],
    slots: int | Sequence[Mapping[str, str]],
    show: Callable[[Outcome], None],
) -> list[Outcome]:
    """Runs jobs in order, as many at a time as ``slots`` says, or as it has variables for; shows each outcome."""
    free = [{}] * slots if isinstance(slots, int) else list(slots)
    waiting, outcomes = list(jobs), list[Outcome]()
    running: dict[int, tuple[_Running, Mapping[str, str]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        try:
            while waiting or running:
                while waiting and free:
                    job, slot = waiting.pop(0), free.pop(0)
                    own = Path(tempfile.mkdtemp(dir=folder))
                    started = _Running(replace(job, environment={**slot, **job.environment}), own)
                    running[started.sentinel] = started, slot
                soonest = min(one.left_s for one, _ in running.values())
                ended = multiprocessing.connection.wait(list(running), None if soonest == math.inf else max(0, soonest))
                late = [sentinel for sentinel, (one, _) in running.items() if one.left_s <= 0]
                for sentinel in dict.fromkeys([*ended, *late]):
                    one, slot = running.pop(cast("int", sentinel))
                    free.append(slot)
                    outcomes.append(one.outcome())
                    show(outcomes[-1])
        finally:
            for one, _ in running.values():
                print(one, flush=True)
                one.end()
    return outcomes


def preload(*more: str) -> None:
    """Imports torch and more, and does once what takes seconds, so that all forks have the modules and the answers."""
    # Compile workers and threads of each process would wait for the cores of the others.
    for name in ("TORCHINDUCTOR_COMPILE_THREADS", "OMP_NUM_THREADS"):
        os.environ.setdefault(name, "1")
    sys.path.insert(0, str(ROOT))
    # Modules ask for GPUs while they are imported; with this variable that does not start CUDA, which cannot be forked.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    torch, *_ = [importlib.import_module(name) for name in (*PRELOADED, *more)]
    if not torch.cuda.is_available():  # loads what compiling needs; after a backward, no fork could run one
        torch.compile(lambda x: x.sin().sum(), mode="reduce-overhead")(torch.ones(9))
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        importlib.import_module("pygraph_trees.report.summary").clear()
    del os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"]
    # Inductor asks which vector instructions work, by small programs and under a lock. Forks have the answer.
    importlib.import_module("torch._inductor.cpu_vec_isa").valid_vec_isa_list()


def job_of(files: Sequence[Path]) -> Job:
    first = files[0].relative_to(ROOT) if files[0].is_relative_to(ROOT) else files[0]
    return Job(str(first) if len(files) == 1 else f"{first.parent} ({len(files)} files)", files)


def groups_of(files: Iterable[Path]) -> list[list[Path]]:
    """Files that share a process, in the order in which they start: those that need a GPU, then the others."""
    alone: list[Path] = []
    of_the_gpu: list[Path] = []
    for file in files:
        (of_the_gpu if file.parent.name == "gpu" else alone).append(file)

    def rank(file: Path) -> tuple[int, int]:
        name = file.stem.removeprefix("test_")
        return SLOWEST.index(name) if name in SLOWEST else len(SLOWEST), -file.stat().st_size

    return [group for group in [sorted(of_the_gpu)] if group] + [[file] for file in sorted(alone, key=rank)]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    jobs = min(len(os.sched_getaffinity(0)), MOST_JOBS)
    parser.add_argument("--jobs", type=int, default=jobs, metavar="N", help=f"files at a time (default {jobs})")
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE", help="test files; default all of test/")
    options = parser.parse_args()
    files = [file.resolve() for file in options.files] or sorted((ROOT / "test").glob("*/test_*.py"))

    processes.end_on_termination()
    os.chdir(ROOT)
    os.environ.setdefault("PYGRAPH_BUILD", "0")  # as in test/cpu/conftest.py, before the package is imported
    with tempfile.TemporaryDirectory() as folder:
        forks = subprocess.Popen([sys.executable, "tools/forks", folder], stdin=subprocess.PIPE)
        preload("pygraph_trees")
        os.environ["LANE_FORKS"] = folder
        start = time.monotonic()
        outcomes = run([job_of(one) for one in groups_of(files)], options.jobs, lambda one: print(one, flush=True))
        forks.terminate()

    failed = [outcome for outcome in outcomes if outcome.status]
    for outcome in failed:
        print(f"\n{'=' * 20} {outcome.job.label}\n{outcome.output}")
    total = {kind: sum(outcome.counts.get(kind, 0) for outcome in outcomes) for kind in (*KINDS, "died")}
    print(f"{described(total)} in {time.monotonic() - start:.0f} s, {len(outcomes)} processes")
    for outcome in failed:
        print(f"  failed: {outcome.job.label}")
    return 1 if failed or not total["passed"] else 0


if __name__ == "__main__":
    sys.exit(main())
