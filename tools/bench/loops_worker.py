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


def loops_of(job: dict[str, Any]) -> Any:
    """The loops of a job's model, which the first step will compile."""
    way, ranks = job["way"], job["ranks"]
    if way.startswith("ours"):
        import pygraph_trees  # noqa: F401  its patches are measured
    import torch

    from bench.captured_updates import CapturedUpdate
    from bench.loops import Loops
    from bench.trained_models import MODELS

    warnings.filterwarnings("ignore")
    torch.set_float32_matmul_precision("high")
    torch.manual_seed(0)
    device = torch.device(job["device"])
    if device.type == "cuda":
        device = torch.device("cuda", job["rank"])
        torch.cuda.set_device(device)
    if ranks:
        import torch.distributed as dist

        store = f"file://{job['store']}"
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, init_method=store, rank=job["rank"], world_size=ranks)

    def compiled(fn: Any) -> Any:
        if ranks:
            fn = torch.nn.parallel.DistributedDataParallel(fn)
        if way in ("eager", "captured"):
            return fn if way == "eager" else CapturedUpdate(fn)
        return torch.compile(fn, mode=None if way == "compile" else "reduce-overhead")

    updates = MODELS[job["model"]](device, device.type != "cuda", compiled)
    if way == "captured":
        updates = [update.losses.args[0].of(update) for update in updates]
    return Loops(updates, device, is_careful=way in ("upstream", "ours-upstream"))


def main(job: str) -> int:
    from child import answering

    loops, say = None, answering()
    for line in sys.stdin:
        command = json.loads(line)
        do, answer = command.pop("do"), {}
        try:
            if do == "prepare":
                loops = loops_of(json.loads(job))
                loops.steps("A", 1)
            else:
                answer = getattr(loops, do)(**command)
        except Exception as error:
            import traceback

            traceback.print_exc()
            said = " ".join(str(error).split())[:300]
            answer = {"error": f"{type(error).__name__}: {said}"}
            if loops is not None:
                loops.abandon()
        say(answer)
    return 0


if __name__ == "__main__":
    sys.path[:1] = [str(ROOT), str(ROOT / "tools")]
    sys.exit(main(sys.argv[1]))
