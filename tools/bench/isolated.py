"""Measures one workload in a process of its own, which can neither disturb nor block the others.

:class:`Worker` starts ``worker.py``, tells it when to prepare and when to measure, and keeps the records that it sends
after each stage. If the process raises, crashes or runs out of time, its earlier records stay, and records that carry
the error fill the rest.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from child import Child

from pygraph_trees.benchmark import REGIMES, Effort, Measurement
from pygraph_trees.benchmark.measure import Progress

from .result_files import from_record

WORKER = Path(__file__).parent / "worker.py"
PREPARED, DONE = "prepared", "done"  # stages that the worker reports; Comparison.stages names the first
_THREADS = "TORCHINDUCTOR_COMPILE_THREADS"


@dataclass(frozen=True, slots=True)
class Job:
    """A workload to measure, and the options."""

    name: str
    mode: str
    batch: int
    ways: tuple[str, ...]
    effort: Effort
    workloads: str  # the module that defines WORKLOADS
    device: str = "cuda"
    caches: str | None = None  # the compilers' caches, if the effort has none for each way
    gpu: int | None = None  # its number; None for the first
    compile_threads: int | None = None  # None leaves Inductor its own number, which is for a process alone

    def environment(self) -> dict[str, str]:
        """The environment of its process."""
        own = {
            "TORCHINDUCTOR_CACHE_DIR": self.caches,
            "CUDA_VISIBLE_DEVICES": self.gpu,
            _THREADS: os.environ.get(_THREADS, self.compile_threads),
        }
        return {**os.environ, **{name: str(value) for name, value in own.items() if value is not None}}


class Worker:
    """The process of one workload: it imports at once, in some 10 s; call :meth:`prepare`, then :meth:`measure`."""

    def __init__(self, job: Job, timeout_s: float) -> None:
        """``timeout_s`` is the limit of each of the two stages."""
        self._job, self._timeout_s = job, timeout_s
        self._records: list[Measurement] = []
        self._error: str | None = None
        self._folder = tempfile.TemporaryDirectory(prefix="bench_")
        self._child = Child([str(WORKER)], asdict(job), Path(self._folder.name) / "log.txt", job.environment())

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()
        self._folder.cleanup()

    def prepare(self) -> None:
        """Starts building the program and compiling and warming up all ways; does not wait."""
        self._until = time.monotonic() + self._timeout_s
        self._child.tell()

    def wait_until_prepared(self, progress: Progress | None = None) -> None:
        """Waits until the process is prepared or has ended; ends it if that takes too long."""
        self._follow(PREPARED, progress)

    def measure(self, progress: Progress | None = None) -> list[Measurement]:
        """Times and inspects the ways; always returns one record for each way and regime."""
        self._until = time.monotonic() + self._timeout_s
        if self._error is None:
            self._child.tell()
            self._follow(DONE, progress)
        self.end()
        return _complete(self._job, self._records, self._error)

    def end(self) -> None:
        self._child.end()

    def _follow(self, last: str, progress: Progress | None) -> None:
        """Takes what the process sends until it reports the stage ``last``, or fails."""
        while self._error is None:
            found = self._child.answer(self._until)
            if "error" in found:
                self._error = found["error"]
                self.end()
            elif "records" in found:
                self._records = [from_record(record) for record in found["records"]]
            elif "progress" in found and progress is not None:
                progress(*found["progress"])
            elif found.get("stage") == last:
                return


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
