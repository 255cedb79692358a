"""Measures one workload in a process of its own, which can neither disturb nor block the others.

:class:`Worker` starts ``worker.py`` with the job as JSON argument, tells it when to prepare and when to measure,
follows its progress on a pipe, and reads the records that it writes after each stage. If the process raises, crashes or
runs out of time, its earlier records stay, and records that carry the error fill the rest.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from processes import end, how_it_ended

from pygraph_trees.benchmark import REGIMES, Effort, Measurement
from pygraph_trees.benchmark.measure import Progress

WORKER = Path(__file__).parent / "worker.py"
IMPORTED, PREPARED = "imported", "prepared"  # messages of the worker
_THREADS = "TORCHINDUCTOR_COMPILE_THREADS"


@dataclass(frozen=True, slots=True)
class Job:
    """A workload to measure, and the options."""

    name: str
    mode: str
    batch: int
    ways: tuple[str, ...]
    effort: Effort
    folder: Path  # of the package of workloads
    device: str = "cuda"
    caches: Path | None = None  # the compilers' caches, if the effort has none for each way
    gpu: int | None = None  # its number; None for the first
    compile_threads: int | None = None  # None leaves Inductor its own number, which is for a process alone

    def environment(self) -> dict[str, str] | None:
        """The environment of its process; None for this one's."""
        own = {} if self.caches is None else {"TORCHINDUCTOR_CACHE_DIR": str(self.caches)}
        if self.gpu is not None:
            own["CUDA_VISIBLE_DEVICES"] = str(self.gpu)
        if self.compile_threads is not None and _THREADS not in os.environ:
            own[_THREADS] = str(self.compile_threads)
        return {**os.environ, **own} if own else None

    def to_json(self, out: Path) -> str:
        """The worker's argument; the worker writes its records to ``out``."""
        fields = {"name": self.name, "ways": self.ways, "folder": str(self.folder), "device": self.device}
        return json.dumps({**fields, "effort": asdict(self.effort), "out": str(out)})


class Worker:
    """The process of one workload: it imports at once, in some 10 s; call :meth:`prepare`, then :meth:`measure`."""

    def __init__(self, job: Job, timeout_s: float) -> None:
        """``timeout_s`` counts from :meth:`prepare`, without the time spent waiting for others."""
        self._job, self._timeout_s, self._left_s = job, timeout_s, timeout_s
        self._ended, self._ending = False, threading.Lock()
        self._progress: Progress | None = None
        self._has_imported, self._is_prepared = threading.Event(), threading.Event()
        self._folder = tempfile.TemporaryDirectory(prefix="bench_")
        self._out, self._log = Path(self._folder.name) / "records.json", Path(self._folder.name) / "log.txt"
        with self._log.open("wb") as errors:
            # In a session of its own, so that its compile workers end with it.
            self._process = subprocess.Popen(
                [sys.executable, str(WORKER), job.to_json(self._out)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=job.environment(),
                text=True,
                start_new_session=True,
            )
        self._follower = threading.Thread(target=self._follow, daemon=True)
        self._follower.start()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()
        self._follower.join(5)
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError):
                assert pipe is not None
                pipe.close()
        self._folder.cleanup()

    @property
    def name(self) -> str:
        return self._job.name

    def prepare(self, progress: Progress | None = None) -> None:
        """Starts building the program and compiling and warming up all ways; does not wait."""
        self._progress = progress
        self._began = time.monotonic()
        self._tell()

    def wait_until_imported(self) -> None:
        """Waits until the process has imported everything, or has ended."""
        self._wait_for(self._has_imported, math.inf)

    def wait_until_prepared(self) -> None:
        """Waits until the process is prepared or has ended; ends it if that takes too long."""
        self._wait_for(self._is_prepared, self._began + self._timeout_s)
        if not self._is_prepared.is_set() and self._process.poll() is None:
            self._left_s = 0.0
            self.end()

    def measure(self, progress: Progress | None = None) -> list[Measurement]:
        """Times and inspects the ways; always returns one record for each way and regime."""
        self._progress = progress or self._progress
        self._tell()
        status: int | None = None
        try:
            if self._left_s > 0:
                status = self._process.wait(self._left_s)
        except subprocess.TimeoutExpired:
            pass
        finally:
            self.end()
        self._follower.join(5)
        return _complete(self._job, _records(self._out), _error(status, self._timeout_s, self._log))

    def _wait_for(self, event: threading.Event, end: float) -> None:
        # Children of a process that has ended may keep its pipe open.
        while not event.wait(0.05) and self._process.poll() is None and time.monotonic() < end:
            pass

    def _tell(self) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # the process has ended; its status says why
            self._process.stdin.write("go on\n")
            self._process.stdin.flush()

    def _follow(self) -> None:
        assert self._process.stdout is not None
        said = {IMPORTED: self._has_imported, PREPARED: self._is_prepared}
        for line in self._process.stdout:
            text = line.rstrip("\n")
            if text in said:
                if text == PREPARED:
                    self._left_s = self._began + self._timeout_s - time.monotonic()
                said[text].set()
            elif self._progress is not None:
                done, total, step = text.split(" ", 2)
                self._progress(int(done), int(total), step)

    def end(self) -> None:
        """Ends the process, once: the id of a process that has ended may be reused."""
        with self._ending:
            if not self._ended:
                end(self._process)
                self._ended = True


def _error(status: int | None, timeout_s: float, log: Path) -> str | None:
    if status == 0:
        return None
    if status is None:
        return f"no end after {timeout_s:g} s"
    return how_it_ended(status, log)


def _records(out: Path) -> list[Measurement]:
    if not out.exists():
        return []
    return [Measurement.from_record(record) for record in json.loads(out.read_text(encoding="utf-8"))]


def _complete(job: Job, records: Sequence[Measurement], error: str | None) -> list[Measurement]:
    """Records of all ways and regimes; failures replace those that a process which ended did not reach."""
    found = {(record.way, record.regime): record for record in records}
    complete = []
    for way in job.ways:
        for regime in REGIMES:
            record = found.get((way, regime))
            if record is None:
                record = Measurement(job.name, job.mode, job.batch, way, regime, error=error or "no record was written")
            elif error is not None and record.error is None and record.latency_ms is None:
                record = record.failed(error)
            complete.append(record)
    return complete
