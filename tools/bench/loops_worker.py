"""Runs the training loops of one model in one way, on command: ``loops_worker.py JOB``, with the job as JSON.

Each line on standard input is a command in JSON: ``prepare``, ``settle`` or ``measure``. The answer is a line of JSON,
with ``error`` if the command raised. Everything else goes to standard error. Upstream's ways import no package of ours.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


class Worker:
    """The commands, by name."""

    def __init__(self, job: dict[str, Any]) -> None:
        self._job = job

    def prepare(self) -> dict[str, Any]:
        way, model, ranks = self._job["way"], self._job["model"], self._job["ranks"]
        if way.startswith("ours"):
            import pygraph_trees  # noqa: F401  its patches are measured
        import torch

        from bench.loops import Loops
        from bench.trained_models import MODELS

        warnings.filterwarnings("ignore")
        torch.set_float32_matmul_precision("high")
        torch.manual_seed(0)
        device = torch.device(self._job["device"])
        if device.type == "cuda":
            device = torch.device("cuda", self._job["rank"])
            torch.cuda.set_device(device)
        if ranks:
            import torch.distributed as dist

            store = f"file://{self._job['store']}"
            backend = "nccl" if device.type == "cuda" else "gloo"
            dist.init_process_group(backend, init_method=store, rank=self._job["rank"], world_size=ranks)

        def compiled(fn: Any) -> Any:
            if ranks:
                fn = torch.nn.parallel.DistributedDataParallel(fn)
            if way == "eager":
                return fn
            return torch.compile(fn, mode=None if way == "compile" else "reduce-overhead")

        updates = MODELS[model](device, device.type != "cuda", compiled)
        self._loops = Loops(updates, device, is_careful=way in ("upstream", "ours-upstream"))
        self._loops.steps("A", 1)
        return {}

    def settle(self, loop: str, steps: int) -> dict[str, Any]:
        return self._loops.settle(loop, steps)

    def measure(self, loop: str) -> dict[str, Any]:
        return self._loops.measure(loop)

    def abandon(self) -> None:
        self._loops.abandon()


def main(job: str) -> int:
    from child import answering

    worker, say = Worker(json.loads(job)), answering()
    for line in sys.stdin:
        command = json.loads(line)
        try:
            answer = getattr(worker, command.pop("do"))(**command)
        except Exception as error:
            import traceback

            traceback.print_exc()
            said = " ".join(str(error).split())[:300]
            answer = {"error": f"{type(error).__name__}: {said}"}
            if hasattr(worker, "_loops"):
                worker.abandon()
        say(answer)
    return 0


if __name__ == "__main__":
    sys.path[:1] = [str(ROOT), str(ROOT / "tools")]
    sys.exit(main(sys.argv[1]))
