"""One workload in a process of its own: what it does there cannot touch the others, nor can it keep them waiting.

:func:`run_isolated` starts ``worker.py`` with the job as JSON in its argument, follows its progress on a pipe and
reads the records that it writes to a file after each stage. A process that raises, crashes or runs out of time leaves
the records that it had; what is missing is filled with records that carry the error.
"""

from __future__ import annotations

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

    def to_json(self, out: Path) -> str:
        """What the worker is told; it writes its records to ``out``."""
        fields = {"name": self.name, "ways": self.ways, "folder": str(self.folder), "device": self.device}
        return json.dumps({**fields, "plan": asdict(self.plan), "out": str(out)})


def run_isolated(job: Job, timeout_s: float, progress: Progress) -> list[Measurement]:
    """Measures one workload; one record for each way and regime, whatever happens."""
    with tempfile.TemporaryDirectory(prefix="bench_") as folder:
        out, log = Path(folder) / "records.json", Path(folder) / "log.txt"
        with log.open("wb") as errors:
            command = [sys.executable, str(WORKER), job.to_json(out)]
            # In a session of its own, so that its compile workers end with it.
            process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True
            )
            follower = threading.Thread(target=_follow, args=(process, progress), daemon=True)
            follower.start()
            try:
                status: int | None = process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                status = None
            finally:
                end(process)
            follower.join(5)
        error = _error(status, timeout_s, log)
        return _complete(job, _records(out), error)


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
