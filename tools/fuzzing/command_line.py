"""Runs random programs and compares them with eager, until the time is over or some have failed.

usage: tools/fuzz [--minutes N] [--cases N]  draw programs, run each with inputs that move, and compare
       tools/fuzz --seed N --program NUMBER  print a program, and run it
       tools/fuzz FILE                       run a printed case again

On a GPU, programs run with CUDA graphs under our patches (--way upstream: without); otherwise on the CPU under a Dynamo
backend. Failing programs are reduced, printed and written to files. Exit status 1: a failure, 2: wrong usage.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import torch
from tested_code import code_hash

from pygraph_trees.cli.progress import Progress

from .campaign import Campaign, Failure, run
from .case import read
from .check import InvalidCase, Mismatch, check, device_of
from .ledger import Entry, add
from .programs import program

_MINUTES, _MOST_MINUTES = 5.0, 60.0  # the second if the number of programs is limited
_MOST_JOBS = 24  # each has its own context and compiler


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="tools/fuzz", description=str(__doc__).splitlines()[0])
    parser.add_argument("case", nargs="?", type=Path, metavar="FILE", help="a case to run again")
    parser.add_argument("--minutes", type=float, help="how long to draw programs (default: 5, or 60 with --cases)")
    parser.add_argument("--program", type=int, metavar="NUMBER", help="only this program of the seed")
    parser.add_argument("--cases", "--programs", type=int, help="stop after so many programs")
    parser.add_argument("--seed", type=int, help="of the programs, as an earlier run printed it (default: a new one)")
    parser.add_argument(
        "--way",
        help="ours, upstream, compile or a Dynamo backend, by name or as module:function; default: ours, or aot_eager",
    )
    parser.add_argument(
        "--control",
        metavar="WAY",
        help="runs where the way differs from eager; if it does the same, that is torch's; default: compile",
    )
    parser.add_argument("--everything", action="store_true", help="with what is off by default, and random delays")
    jobs = max(1, min(_MOST_JOBS, (os.cpu_count() or 1) - 1))  # most of the cores: programs spend their time compiling
    parser.add_argument("--jobs", type=int, default=jobs, help="processes at a time (default: %(default)s here)")
    parser.add_argument("--failures", type=int, default=1, metavar="N", help="stop after so many (default: 1)")
    parser.add_argument("--reduce", type=float, default=120.0, metavar="SECONDS", help="for each (default: 120)")
    parser.add_argument("--out", type=Path, default=Path("fuzz-failures"), help="folder for the failing cases")
    parser.add_argument("--ledger", type=Path, metavar="FILE", help="file to which the campaign is added")
    options = parser.parse_args(arguments)

    minutes = options.minutes if options.minutes is not None else _MINUTES if options.cases is None else _MOST_MINUTES
    if min(options.jobs, options.failures) < 1 or minutes <= 0 or (options.cases is not None and options.cases < 1):
        parser.error("expected at least one job, one program and more than no time")
    on_gpu = torch.cuda.is_available()
    way = options.way or ("ours" if on_gpu else "aot_eager")
    control = options.control or ("compile" if on_gpu and way != "compile" else None)
    if not on_gpu and not {way, control}.isdisjoint(("ours", "upstream")):
        parser.error("a way with graphs needs a GPU, and this machine has none that torch can use")
    if not on_gpu:
        print(f"there is no GPU: programs run on the CPU under {way}, without CUDA graphs", file=sys.stderr)

    if options.program is not None and options.seed is None:
        parser.error("--program needs --seed")
    if options.case is not None or options.program is not None:
        try:
            if options.case is not None:
                case = read(options.case.read_text(encoding="utf-8"))
            else:
                case = program(options.seed, options.program, graphs=on_gpu)
                print(case.text())
        except (OSError, ValueError) as error:
            parser.error(str(error))
        device = device_of("cuda" if on_gpu else "cpu")
        try:
            verdict = check(case, device, under_test=way, control=control)
        except (InvalidCase, Mismatch) as error:
            print(f"{type(error).__name__}: {error}")
            return 1
        print(verdict.torch_differs or "agrees with eager")
        return 0

    seed = random.randrange(1 << 30) if options.seed is None else options.seed
    print(f"seed {seed}, {options.jobs} jobs")  # the seed gives the same programs again
    campaign = Campaign(
        device="cuda" if on_gpu else "cpu",
        under_test=way,
        control=control,
        everything=options.everything,
        seconds=minutes * 60,
        seed=seed,
        most_cases=options.cases,
        jobs=options.jobs,
        most_failures=options.failures,
        reduce_s=options.reduce,
    )

    def write(failure: Failure) -> None:
        options.out.mkdir(parents=True, exist_ok=True)
        path = options.out / f"{seed}-{failure.number}.py"
        message = "".join(f"# {line}\n" for line in failure.message.splitlines())
        path.write_text(message + failure.case.text(), encoding="utf-8")
        print(f"\n{failure.message}\n\n{failure.case.text()}\nwritten to {path}; tools/fuzz {path} runs it again")

    outcome = run(campaign, Progress(), write)
    print(outcome.counts, outcome.counts.table(), sep="\n")
    if options.ledger is not None:
        counts = {name: value for name, value in asdict(outcome.counts).items() if isinstance(value, int)}
        counts["ungraphed_calls"] = sum(outcome.counts.ungraphed.values())
        on = f"{torch.cuda.device_count()} {torch.cuda.get_device_name()}" if on_gpu else "none"
        failures = [f"{seed}-{failure.number}: {failure.message.splitlines()[0]}" for failure in outcome.failures]
        ran = Entry(code_hash()[:8], torch.__version__, on, [seed], outcome.counts.cases, options.everything, failures)
        add(replace(ran, counts=counts), options.ledger)
    return 1 if outcome.failures else 0
