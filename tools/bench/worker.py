"""The process in which one workload is measured: ``worker.py JOB``, with the job as JSON (see ``isolated.py``).

Imports what it needs, makes a file that says so, and waits for a line on standard input before anything is done on the
GPU. The line may name the file of the next process: nothing is timed while that one still imports. Writes the records
to a file after each stage, and a line of progress to standard output before each step: steps done, steps in all, what
comes next. What programs print goes to standard error.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

_LONGEST_IMPORT_S = 60  # of a next process, which may be gone

ROOT = Path(__file__).resolve().parents[2]


def main(job: str) -> int:
    told = json.loads(job)
    from bench.loading import load_workloads
    from pygraph_trees.comparison import Measurement, Plan, compare

    out = Path(told["out"])
    told_to, sys.stdout = sys.stdout, sys.stderr

    def write(records: list[Measurement]) -> None:
        partial = out.with_suffix(".part")
        partial.write_text(json.dumps([record.to_record() for record in records]), encoding="utf-8")
        os.replace(partial, out)

    def progress(done: int, total: int, text: str) -> None:
        if text.startswith("timing "):
            _wait_for(awaited)
        print(done, total, text, file=told_to, flush=True)

    plan: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in told["plan"].items()
    }
    try:
        workload = load_workloads(Path(told["folder"]))[told["name"]]
    finally:
        Path(told["ready"]).touch()  # nobody waits for one that is broken
    line = sys.stdin.readline()
    if not line:
        return 1  # nobody waits for it any longer
    awaited = [Path(path) for path in json.loads(line)]
    progress(0, 1, f"building {workload.name}")
    program = workload.build(told["device"])
    compare(program, told["ways"], Plan(**plan), progress, write)
    return 0


def _wait_for(awaited: list[Path]) -> None:
    """Until the files are there; the list is empty then."""
    end = time.monotonic() + _LONGEST_IMPORT_S
    while awaited and time.monotonic() < end:
        awaited[:] = [path for path in awaited if not path.exists()]
        time.sleep(0.05 if awaited else 0)
    awaited.clear()


if __name__ == "__main__":
    # The folder of this file would make ``bench``'s modules importable twice, under two names.
    sys.path[:1] = [str(ROOT), str(ROOT / "tools")]
    sys.exit(main(sys.argv[1]))
