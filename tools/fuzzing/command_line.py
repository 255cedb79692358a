"""Runs random programs and compares them with eager, until the time is over or one fails.

usage: tools/fuzz [--minutes N] [--cases N]  draw programs, run each with inputs that move, and compare
       tools/fuzz FILE                       run a printed case again

On a GPU, programs run with CUDA graphs under our patches (--way upstream: without); otherwise on the CPU under a Dynamo
backend. A failing program is reduced, printed and written to a file. Exit status 1: a failure, 2: wrong usage.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from pygraph_trees.cli.progress import Progress

from .campaign import Campaign, run
from .case import read
from .check import InvalidCase, Mismatch, check

_MINUTES, _MOST_MINUTES = 5.0, 60.0  # the second if the number of programs is limited
_MOST_JOBS = 12  # each has its own context and compiler


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="tools/fuzz", description=str(__doc__).splitlines()[0])
    parser.add_argument("case", nargs="?", type=Path, metavar="FILE", help="a case to run again")
    parser.add_argument("--minutes", type=float, help="how long to draw programs (default: 5, or 60 with --cases)")
    parser.add_argument("--cases", "--programs", type=int, help="stop after so many programs")
    parser.add_argument("--seed", type=int, help="of the programs, as an earlier run printed it (default: a new one)")
    parser.add_argument(
        "--way",
        help="ours, upstream, compile or a Dynamo backend, by name or as module:function; default: ours, or aot_eager",
    )
    parser.add_argument(
        "--control",
        metavar="WAY",
        help="asked where the way differs from eager: what it does as well is torch's; default: upstream for ours, "
        "compile for upstream",
    )
    parser.add_argument("--exact", action="store_true", help="must also equal torch.compile without graphs, bit by bit")
    parser.add_argument("--jobs", type=int, default=_jobs(), help="processes at a time (default: %(default)s here)")
    parser.add_argument("--out", type=Path, default=Path("fuzz-failure.py"), help="where a failing case is written")
    options = parser.parse_args(arguments)

    minutes = options.minutes if options.minutes is not None else _MINUTES if options.cases is None else _MOST_MINUTES
    if options.jobs < 1 or minutes <= 0 or (options.cases is not None and options.cases < 1):
        parser.error("expected at least one job, one program and more than no time")
    on_gpu = torch.cuda.is_available()
    way = options.way or ("ours" if on_gpu else "aot_eager")
    if not on_gpu and way in ("ours", "upstream"):
        parser.error(f"--way {way} needs a GPU, and this machine has none that torch can use")
    if not on_gpu:
        print(f"there is no GPU: programs run on the CPU under {way}, without CUDA graphs", file=sys.stderr)
    control, exactly = options.control, "compile" if options.exact else None
    if on_gpu and control is None:
        control = {"ours": "upstream", "upstream": "compile"}.get(way)
    if not on_gpu and (options.exact or control in ("ours", "upstream")):
        parser.error("--exact and controls with graphs need a GPU, and this machine has none that torch can use")

    if options.case is not None:
        try:
            case = read(options.case.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            parser.error(str(error))
        device = torch.device("cuda" if on_gpu else "cpu")
        try:
            verdict = check(case, device, under_test=way, control=control, exactly=exactly)
        except (InvalidCase, Mismatch) as error:
            print(f"{type(error).__name__}: {error}")
            return 1
        print(verdict.torch_differs or "agrees with eager")
        return 0

    seed = random.randrange(1 << 30) if options.seed is None else options.seed
    print(f"seed {seed}, {options.jobs} jobs")  # they give the same programs again
    campaign = Campaign(
        device="cuda" if on_gpu else "cpu",
        under_test=way,
        control=control,
        exactly=exactly,
        seconds=minutes * 60,
        seed=seed,
        most_cases=options.cases,
        jobs=options.jobs,
    )
    outcome = run(campaign, Progress())
    print(outcome.counts)
    print(outcome.counts.table())
    if outcome.failure is None:
        return 0
    text = outcome.failure.case.text()
    options.out.write_text(text, encoding="utf-8")
    print(f"\n{outcome.failure.message}\n\n{text}\nwritten to {options.out}; tools/fuzz {options.out} runs it again")
    return 1


def _jobs() -> int:
    """Most of the cores: a program spends its time compiling."""
    return max(1, min(_MOST_JOBS, (os.cpu_count() or 1) - 2))
