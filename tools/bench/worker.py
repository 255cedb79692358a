"""The process in which one workload is measured: ``worker.py JOB``, with the job as JSON (see ``isolated.py``).

Imports what it needs, and waits for a line on standard input before anything is done on the GPU. Writes the records to
a file after each stage, and a line of progress to standard output before each step: steps done, steps in all, what
comes next. What programs print goes to standard error.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

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
        print(done, total, text, file=told_to, flush=True)

    plan: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in told["plan"].items()
    }
    workload = load_workloads(Path(told["folder"]))[told["name"]]
    if not sys.stdin.readline():
        return 1  # nobody waits for it any longer
    progress(0, 1, f"building {workload.name}")
    program = workload.build(told["device"])
    compare(program, told["ways"], Plan(**plan), progress, write)
    return 0


if __name__ == "__main__":
    # The folder of this file would make ``bench``'s modules importable twice, under two names.
    sys.path[:1] = [str(ROOT), str(ROOT / "tools")]
    sys.exit(main(sys.argv[1]))
