"""Measures one workload in this process: ``worker.py JOB``, with the job as JSON (see ``isolated.py``).

A line on standard input starts each stage: the worker imports and waits; builds and prepares, reports and waits; then
times and inspects. Standard output carries progress, records and stages; what programs print does not.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def main(job: str) -> int:
    told = json.loads(job)
    from child import answering

    say = answering()
    from bench.isolated import DONE, PREPARED
    from bench.result_files import to_record
    from pygraph_trees.benchmark import Comparison, Effort

    def wait() -> None:
        if not sys.stdin.readline():
            sys.exit(1)  # the parent is gone

    def progress(done: int, total: int, text: str) -> None:
        say({"progress": (done, total, text)})

    workload = importlib.import_module(told["workloads"]).WORKLOADS[told["name"]]
    wait()
    progress(0, 1, f"building {workload.name}")
    program = workload.build(told["device"])
    for stage, records in Comparison(program, told["ways"], Effort(**told["effort"]), progress).stages():
        say({"records": [to_record(record) for record in records]})
        if stage == PREPARED:
            say({"stage": PREPARED})
            wait()
    say({"stage": DONE})
    return 0


if __name__ == "__main__":
    # The folder of this file would make ``bench``'s modules importable twice, under two names.
    sys.path[:1] = [str(ROOT), str(ROOT / "tools")]
    sys.exit(main(sys.argv[1]))
