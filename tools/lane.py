#!/usr/bin/env python3
"""Runs test files, each in a process of its own, and prints a line for each as it ends.

usage: tools/lane.py [--jobs N] [FILE ...]     default: all of test/, as many at a time as there are cores, 4 at most

The processes are forks of this one, which imports torch once. The slowest files start first. All files of test/gpu
share one process: without a GPU they are skipped, with one `tools/gpu_suite` is the tool for them. The output of files
that fail comes last, then the totals; the exit status is 1 if anything failed. An interrupt ends all processes.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path

import processes
import pytest

ROOT = Path(__file__).resolve().parent.parent
MOST_JOBS = 4
# Files of test/cpu that take longer than their size suggests, the slowest first; the others follow by size.
SLOWEST: tuple[str, ...] = (
    "test_bench",
    "test_fuzz",
    "test_placement_graphs",
    "test_constants",
    "test_parity_harness",
    "test_examples_cpu",
    "test_flags",
    "test_fake_gpu",
)
PRELOADED = ("torch", "torch._inductor.compile_fx", "torch.testing._internal.common_utils")
KINDS = ("passed", "failed", "error", "skipped", "xfailed", "xpassed")


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of the files of one process."""

    label: str
    counts: Mapping[str, int]  # by kind of outcome
    seconds: float
    output: str
    status: int  # exit status of the process; negative: the signal that ended it

    @property
    def failed(self) -> bool:
        return self.status != 0

    def __str__(self) -> str:
        return f"{self.label}: {described(self.counts)} in {self.seconds:.0f} s"


def described(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in counts.items() if count) or "no tests"


class _Counter:
    """A pytest plugin that writes how many tests had which outcome."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        found = {kind: len(terminalreporter.stats.get(kind, ())) for kind in KINDS}
        self._path.write_text(json.dumps(found), encoding="utf-8")


class _Running:
    """The process of some files: a fork in a session of its own."""

    def __init__(self, files: Sequence[Path], folder: Path) -> None:
        self._label = label_of(files)
        self._log, self._counts = folder / "output", folder / "counts"
        self._start = time.monotonic()
        fork = multiprocessing.get_context("fork")
        self._process: BaseProcess = fork.Process(target=self._run, args=([str(file) for file in files],))
        self._process.start()

    @property
    def sentinel(self) -> int:
        return self._process.sentinel

    def _run(self, files: list[str]) -> None:
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        log = os.open(self._log, os.O_WRONLY | os.O_CREAT)
        for stream in (sys.stdout, sys.stderr):
            os.dup2(log, stream.fileno())
        sys.argv[1:] = files
        sys.exit(int(pytest.main(["-q", "-p", "no:cacheprovider", *files], plugins=[_Counter(self._counts)])))

    def end(self) -> None:
        """Ends the process and everything that it has started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid or 0, signal.SIGKILL)
        self._process.kill()  # if its session has not begun yet
        self._process.join()

    def outcome(self) -> Outcome:
        seconds = time.monotonic() - self._start
        self.end()
        status = self._process.exitcode or 0
        counts = json.loads(self._counts.read_text(encoding="utf-8")) if self._counts.exists() else {}
        output = self._log.read_text(encoding="utf-8", errors="replace")
        if status not in (0, 1):
            counts |= {"died": 1}
            output += f"\nthe process ended with {processes.cause_of(status)}\n"
        return Outcome(self._label, counts, seconds, output, status)


def label_of(files: Sequence[Path]) -> str:
    first = files[0].relative_to(ROOT) if files[0].is_relative_to(ROOT) else files[0]
    return str(first) if len(files) == 1 else f"{first.parent} ({len(files)} files)"


def run(groups: Iterable[Sequence[Path]], jobs: int, show: Callable[[Outcome], None]) -> list[Outcome]:
    """Runs groups of files in order, ``jobs`` at a time; ``show`` is given each outcome as it comes."""
    waiting, running, outcomes = list(groups), {}, []
    with tempfile.TemporaryDirectory() as folder:
        try:
            while waiting or running:
                while waiting and len(running) < jobs:
                    own = Path(folder, str(len(outcomes) + len(running)))
                    own.mkdir()
                    started = _Running(waiting.pop(0), own)
                    running[started.sentinel] = started
                for sentinel in multiprocessing.connection.wait(list(running)):
                    outcomes.append(running.pop(sentinel).outcome())
                    show(outcomes[-1])
        finally:
            for one in running.values():
                one.end()
    return outcomes


def groups_of(files: Iterable[Path]) -> list[list[Path]]:
    """Files that share a process, in the order in which they start: those that need a GPU, then the others."""
    alone, of_the_gpu = [], []
    for file in files:
        (of_the_gpu if file.parent.name == "gpu" else alone).append(file)

    def rank(file: Path) -> tuple[int, int]:
        return SLOWEST.index(file.stem) if file.stem in SLOWEST else len(SLOWEST), -file.stat().st_size

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
    # Compile workers and threads of each process would wait for the cores of the others.
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    sys.path.insert(0, str(ROOT))
    for name in PRELOADED:
        importlib.import_module(name)
    start = time.monotonic()
    outcomes = run(groups_of(files), options.jobs, lambda outcome: print(outcome, flush=True))

    failed = [outcome for outcome in outcomes if outcome.failed]
    for outcome in failed:
        print(f"\n{'=' * 20} {outcome.label}\n{outcome.output}")
    total = {kind: sum(outcome.counts.get(kind, 0) for outcome in outcomes) for kind in (*KINDS, "died")}
    print(f"{described(total)} in {time.monotonic() - start:.0f} s, {len(outcomes)} processes")
    for outcome in failed:
        print(f"  failed: {outcome.label}")
    return 1 if failed or not total["passed"] else 0


if __name__ == "__main__":
    sys.exit(main())
