"""One workload in a process of its own: what it does there cannot touch the others, nor can it keep them waiting.

:class:`Worker` starts ``worker.py`` with the job as JSON in its argument, tells it when to begin and which process
still imports, follows its progress on a pipe and reads the records that it writes to a file after each stage. A process
that raises, crashes or runs out of time leaves the records that it had; what is missing is filled with records that
carry the error.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from processes import end, how_it_ended

from pygraph_trees.comparison import REGIMES, Measurement, Plan
from pygraph_trees.comparison.measure import Progress

WORKER = Path(__file__).parent / "worker.py"


@dataclass(frozen=True, slots=True)
class Job:
    """A workload to measure, and how."""

    name: str
    mode: str
    batch: int
    ways: tuple[str, ...]
    plan: Plan
    folder: Path  # of the package of workloads
    device: str = "cuda"

    def to_json(self, out: Path, ready: Path) -> str:
        """What the worker is told; it writes its records to ``out`` and makes ``ready`` when it has imported."""
        fields = {"name": self.name, "ways": self.ways, "folder": str(self.folder), "device": self.device}
        return json.dumps({**fields, "plan": asdict(self.plan), "out": str(out), "ready": str(ready)})


class Worker:
    """The process of one workload. It imports what it needs at once, some 10 s, and waits for :meth:`run`."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._ended = False
        self._folder = tempfile.TemporaryDirectory(prefix="bench_")
        self._out, self._log = Path(self._folder.name) / "records.json", Path(self._folder.name) / "log.txt"
        self._ready = Path(self._folder.name) / "ready"
        with self._log.open("wb") as errors:
            # In a session of its own, so that its compile workers end with it.
            self._process = subprocess.Popen(
                [sys.executable, str(WORKER), job.to_json(self._out, self._ready)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                start_new_session=True,
            )

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError):
                assert pipe is not None
                pipe.close()
        self._folder.cleanup()

    def run(self, timeout_s: float, progress: Progress, beside: Worker | None = None) -> list[Measurement]:
        """Measures the workload; one record for each way and regime, whatever happens.

        Nothing is timed before ``beside``, another process, has imported what it needs.
        """
        assert self._process.stdin is not None
        follower = threading.Thread(target=_follow, args=(self._process, progress), daemon=True)
        follower.start()
        with contextlib.suppress(OSError):  # it is gone, and its status says why
            self._process.stdin.write(json.dumps([] if beside is None else [str(beside._ready)]) + "\n")
            self._process.stdin.flush()
        try:
            status: int | None = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            self._end()
        follower.join(5)
        return _complete(self._job, _records(self._out), _error(status, timeout_s, self._log))

    def _end(self) -> None:
        """Once: the number of a process that is gone may be another one's."""
        if not self._ended:
            end(self._process)
            self._ended = True


def _follow(process: subprocess.Popen[str], progress: Progress) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        done, total, text = line.rstrip("\n").split(" ", 2)
        progress(int(done), int(total), text)


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
    """Records of all ways and regimes: what there is, and failures for what a dead process did not get to."""
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
