"""Measures training loops as people write them: upstream, no graphs, ours, and ours with upstream's outputs.

usage: python tools/bench/training_loops.py [MODELS ...] [--ways WAY,...] [--rounds N] [--budget S] [--ranks N]

Each model and way has its own process, which runs the loops one after the other, as a notebook does. Ways take turns in
each loop. With ``--ranks``, models are trained under DistributedDataParallel on N GPUs. README.md has the details.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[n]) for n in (2, 1)]

from child import Child
from processes import end_on_termination

WORKER = Path(__file__).parent / "loops_worker.py"
ROOT = Path(__file__).resolve().parents[2]
WAYS = ("upstream", "compile", "ours", "ours-upstream")
LOOPS = "ABCEFG"
OF_RANKS = {"models": ("bert",), "ways": ("upstream", "ours"), "loops": "ABCEF"}
_ENVIRONMENT = {"ours-upstream": {"PYGRAPH_OUTPUTS": "upstream"}}
_WARM = 16  # steps of each loop before the rounds
_COMPILE_THREADS = "2"  # of each process; up to twenty of them compile at the same time
_STEP_S = 60.0  # time limit of one turn of a loop
_SHARE = 0.6  # share of the budget within which a process must have compiled


@dataclass(frozen=True, slots=True)
class Job:
    """One model, run in one way."""

    model: str
    way: str
    device: str = "cuda"
    ranks: int = 0  # 0: one process without a process group


@dataclass(slots=True)
class Measured:
    """A job's answers about one loop."""

    job: Job
    loop: str
    settled: dict[str, Any] = field(default_factory=dict)
    rounds: list[dict[str, Any]] = field(default_factory=list)
    error: str | None = None


def start(job: Job, rank: int, folder: Path) -> Child:
    """Starts a job's process of one rank, which gets commands and answers each."""
    name = f"{job.model}-{job.way}-{rank}"
    told = {**dataclasses.asdict(job), "rank": rank, "store": str(folder / f"{job.model}-{job.way}.store")}
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "TORCHINDUCTOR_COMPILE_THREADS": os.environ.get("TORCHINDUCTOR_COMPILE_THREADS", _COMPILE_THREADS),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / f"{name}.caches"),
        **_ENVIRONMENT.get(job.way, {}),
    }
    return Child([str(WORKER)], told, folder / f"{name}.log", environment)


class Group:
    """The processes of one job, one for each rank. They get the same commands; the slowest one counts."""

    def __init__(self, job: Job, loops: str, folder: Path) -> None:
        self.job = job
        self.measured = [Measured(job, loop) for loop in loops]
        self._processes = [start(job, rank, folder) for rank in range(max(job.ranks, 1))]
        self.error: str | None = None  # why it gets no more commands

    def tell(self, **command: Any) -> None:
        for process in self._processes:
            process.tell(**command)

    def answer(self, until: float) -> dict[str, Any]:
        answers = [process.answer(until) for process in self._processes]
        failed = [answer for answer in answers if "error" in answer]
        if failed:
            # If only some ranks failed, the others may wait for them forever.
            if len(failed) < len(answers) or any("is_dead" in answer for answer in failed):
                self.error = failed[0]["error"]
                self.end()
            return failed[0]
        return max(answers, key=lambda answer: answer.get("step_us", 0.0))

    def ask(self, within_s: float, **command: Any) -> dict[str, Any]:
        if self.error is not None:
            return {"error": self.error}
        self.tell(**command)
        return self.answer(time.monotonic() + within_s)

    def end(self) -> None:
        for process in self._processes:
            process.end()


def measure(
    jobs: Sequence[Job], loops: str, rounds: int, budget_s: float, log: Callable[[str], None], warm: int = _WARM
) -> list[Measured]:
    """Measures all jobs. If a process fails, the others continue."""
    began = time.monotonic()
    groups: list[Group] = []
    with tempfile.TemporaryDirectory(prefix="training_loops_") as folder:
        try:
            groups += [Group(job, loops, Path(folder)) for job in jobs]
            for group in groups:
                group.tell(do="prepare")
            for group in groups:
                answer = group.answer(began + _SHARE * budget_s)
                if "error" in answer:
                    group.error = answer["error"]
                    log(f"{group.job.model}, {group.job.way}: {group.error}")
            log(f"compiled after {time.monotonic() - began:.0f} s")
            for group in groups:
                for one in group.measured:
                    one.settled = group.ask(_STEP_S, do="settle", name=one.loop, count=warm)
                    one.error = one.settled.pop("error", None)
            log(f"warmed up after {time.monotonic() - began:.0f} s")
            for number in range(rounds):
                begin = time.monotonic()
                _measure_round(groups, number)
                took = time.monotonic() - begin
                log(f"round {number + 1} took {took:.0f} s")
                if time.monotonic() + took > began + budget_s:
                    break
        finally:
            for group in groups:
                group.end()
    log(f"done after {time.monotonic() - began:.0f} s")
    return [one for group in groups for one in group.measured]


def _measure_round(groups: Sequence[Group], number: int) -> None:
    """Measures each loop of each model once; every other round begins with the last way."""
    by_model: dict[str, list[Group]] = {}
    for group in groups:
        by_model.setdefault(group.job.model, []).append(group)
    for ways in by_model.values():
        for loop in range(len(ways[0].measured)):
            for group in ways if number % 2 == 0 else reversed(ways):
                one = group.measured[loop]
                if one.error is not None:
                    continue
                answer = group.ask(_STEP_S, do="measure", name=one.loop)
                if "error" in answer:
                    one.error = answer["error"]
                else:
                    one.rounds.append(answer)


TIMES = ("forward_us", "backward_us", "host_us", "done_us", "step_us")


def result(one: Measured) -> dict[str, Any]:
    """A loop's record in the file: medians over rounds, lowest and highest round, counts of the last round."""
    known: dict[str, Any] = {"model": one.job.model, "way": one.job.way, "loop": one.loop, **one.settled}
    if one.error is not None or not one.rounds:
        return {**known, "error": one.error or "no round"}
    last = one.rounds[-1]
    over = {name: [answer[name] for answer in one.rounds] for name in (*TIMES, "allocations")}
    return {
        **known,
        **{name: round(statistics.median(values), 2) for name, values in over.items()},
        "spread": {name: [round(min(over[name]), 1), round(max(over[name]), 1)] for name in TIMES},
        "peak_bytes": max(answer["peak_bytes"] for answer in one.rounds),
        "reserved_bytes": max(answer["reserved_bytes"] for answer in one.rounds),
        **{name: last[name] for name in ("recordings", "steps_counted", "counters")},
        "rounds": len(one.rounds),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    from bench import RESULTS_FOLDER
    from bench.figures import has_gpu, one_of, several_of, write_figures
    from bench.loops_table import table
    from bench.result_files import file_stem
    from bench.trained_models import MODELS

    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument(
        "models", nargs="*", metavar="MODELS", type=one_of(MODELS), help=f"some of {', '.join(MODELS)}; all by default"
    )
    parser.add_argument(
        "--ways",
        type=several_of((*WAYS, "eager", "captured")),
        help=f"separated by commas: {', '.join(WAYS)}; also eager, and captured for sac in loop A",
    )
    parser.add_argument("--loops", type=lambda text: list(map(one_of(LOOPS), text)), help=f"letters among {LOOPS}")
    parser.add_argument("--rounds", type=int, default=5, help="at most (5)")
    parser.add_argument("--budget", type=float, default=280.0, metavar="S", help="seconds in all (280)")
    parser.add_argument(
        "--ranks", type=int, default=0, metavar="N", help="train with DistributedDataParallel on N GPUs"
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: small models, as a trial")
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="file of the figures; in tools/bench/results by default"
    )
    options = parser.parse_args(arguments)
    of_ranks = OF_RANKS if options.ranks else {"models": tuple(MODELS), "ways": WAYS, "loops": LOOPS}
    models, ways, loops = (getattr(options, name) or default for name, default in of_ranks.items())
    if options.ranks and "sac" in models:
        parser.error("with --ranks, a model is one module: sac has three")
    if options.device == "cuda" and not has_gpu():
        return 2
    jobs = [Job(model, way, options.device, options.ranks) for model in models for way in ways]
    measured = measure(jobs, loops, options.rounds, options.budget, lambda text: print(text, flush=True))
    results = [result(one) for one in measured]
    print(table(results))
    out = options.out
    if out is None and options.device == "cuda":
        import torch

        stem = file_stem(torch.cuda.get_device_name(), torch.__version__)
        end = f"-{options.ranks}-ranks" if options.ranks else ""
        out = RESULTS_FOLDER / f"{stem}-training-loops{end}.json"
    rounds = max((found.get("rounds", 0) for found in results), default=0)
    ranks = {"ranks": options.ranks} if options.ranks else {}
    write_figures(out, results, date=time.strftime("%Y-%m-%d"), rounds=rounds, budget_s=options.budget, **ranks)
    return 0 if any("error" not in found for found in results) else 1


if __name__ == "__main__":
    end_on_termination()
    sys.exit(main())
