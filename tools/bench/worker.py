"""Measures one workload in this process: ``worker.py JOB``, with the job as JSON (see ``isolated.py``).

A line on standard input starts each stage: the worker imports, reports and waits; builds and prepares, reports and
waits; then times and inspects. It does nothing on the GPU before the first line, and chooses nothing by time before the
second. Records go to a file. Standard output carries reports and progress; what programs print goes to standard error.
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
    from bench.isolated import IMPORTED, PREPARED
    from bench.loading import load_workloads
    from pygraph_trees.benchmark import Effort, Measurement, compare

    out = Path(told["out"])
    told_to, sys.stdout = sys.stdout, sys.stderr

    def say_and_wait(what: str) -> None:
        print(what, file=told_to, flush=True)
        if not sys.stdin.readline():
            sys.exit(1)  # the parent is gone

    def write(records: list[Measurement]) -> None:
        partial = out.with_suffix(".part")
        partial.write_text(json.dumps([record.to_record() for record in records]), encoding="utf-8")
        os.replace(partial, out)

    def progress(done: int, total: int, text: str) -> None:
        print(done, total, text, file=told_to, flush=True)

    effort: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in told["effort"].items()
    }
    workload = load_workloads(Path(told["folder"]))[told["name"]]
    say_and_wait(IMPORTED)
    progress(0, 1, f"building {workload.name}")
    program = workload.build(told["device"])
    compare(program, told["ways"], Effort(**effort), progress, write, lambda: say_and_wait(PREPARED))
    return 0


if __name__ == "__main__":
    # The folder of this file would make ``bench``'s modules importable twice, under two names.
    sys.path[:1] = [str(ROOT), str(ROOT / "tools")]
    sys.exit(main(sys.argv[1]))
