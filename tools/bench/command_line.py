"""The command line of the benchmark: parses arguments, runs workloads in batches, and writes results after each.

Workloads that the result file already has, measured by the same code, can be skipped, so an interrupted run continues.
Returns the exit status that ``__main__`` documents.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import itertools
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from pygraph_trees.benchmark import WAYS, Effort, Measurement, text_table
from pygraph_trees.benchmark.ways import FLAGS
from pygraph_trees.cli.progress import Progress

from . import RESULTS_FOLDER, START_FOLDER, summary
from .figures import has_gpu, one_of, product_hash, several_of
from .isolated import Job, Worker
from .result_files import Results, file_stem, here

FEW_CORES = 1.0  # busy ones


def parser() -> argparse.ArgumentParser:
    parse = argparse.ArgumentParser(
        prog="python tools/bench",
        description="Measures workloads in four ways (eager, compile, upstream, ours), each in a process of its own. "
        "Without --out, the page of results and the README's table are regenerated at the end.",
    )
    parse.add_argument("names", nargs="*", metavar="NAMES", help="workloads; all of them by default")
    parse.add_argument("--list", action="store_true", help="show the workloads and do nothing")
    length = parse.add_mutually_exclusive_group()
    length.add_argument("--quick", action="store_true", help="3 short rounds")
    length.add_argument("--full", action="store_true", help="15 long rounds")
    length.add_argument(
        "--start-times",
        action="store_true",
        help="times to compile and record alone, of upstream and ours; a file of their own in results/start",
    )
    parse.add_argument("--rounds", type=int, metavar="N", help="rounds of interleaved blocks (7)")
    parse.add_argument(
        "--ways",
        type=several_of(FLAGS),
        metavar="A,B",
        help="some of eager,compile,upstream,ours,ours:patch,ours:table,ours:graphed,ours:keep,ours:overwrite",
    )
    jobs = "workloads prepared at a time (1), which share the cores, and timed one by one; with several there are no "
    jobs += "times to compile"
    gpus = "GPUs of one kind (1); as many workloads are timed at a time, each on a GPU of its own"
    for name, what in (("--jobs", jobs), ("--gpus", gpus)):
        parse.add_argument(name, type=_at_least_one, default=1, metavar="N", help=what)
    parse.add_argument(
        "--caches",
        type=Path,
        metavar="DIR",
        help="keep what compilers cache in DIR, for a run that is cut and goes on; there are no times to compile then",
    )
    parse.add_argument("--out", type=Path, metavar="FILE", help="result file, .json")
    parse.add_argument(
        "--timeout",
        type=float,
        default=1800.0,
        metavar="S",
        help="seconds for each stage of a workload: to prepare, to measure (1800)",
    )
    parse.add_argument("--resume", action="store_true", help="keep what the result file has of this code and machine")
    parse.add_argument("--workloads", default="bench.workloads", metavar="MODULE", help=argparse.SUPPRESS)
    return parse


def _at_least_one(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected at least 1, got {number}")
    return number


def main(arguments: Sequence[str]) -> int:
    parse = parser()
    options = parse.parse_args(arguments)
    workloads = importlib.import_module(options.workloads).WORKLOADS
    if options.list:
        print(listing(workloads))
        return 0
    try:
        names = list(map(one_of(workloads), options.names or workloads))
    except argparse.ArgumentTypeError as error:
        parse.error(str(error))
    ways = options.ways or (("upstream", "ours") if options.start_times else WAYS)
    if not has_gpu():
        return 2
    return _measure(names, workloads, ways, _effort(options), options)


def listing(workloads: Mapping[str, Any]) -> str:
    """Name, mode, batch and one line for each workload."""
    rows = [(w.name, w.mode, str(w.batch), w.doc) for w in workloads.values()]
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    return "\n".join(
        f"{name:{widths[0]}}  {mode:{widths[1]}}  {batch:>{widths[2]}}  {doc}" for name, mode, batch, doc in rows
    )


def _effort(options: argparse.Namespace) -> Effort:
    length = {"rounds": 3, "block_s": 0.1} if options.quick else {"rounds": 15, "block_s": 0.3} if options.full else {}
    effort = Effort(**length, fresh_caches=options.caches is None)
    if options.start_times:
        return replace(effort, rounds=0, inspect=False)
    return replace(effort, rounds=options.rounds) if options.rounds else effort


def _measure(
    names: Sequence[str],
    workloads: Mapping[str, Any],
    ways: Sequence[str],
    effort: Effort,
    options: argparse.Namespace,
) -> int:
    results = here(product_hash(), effort.rounds)
    folder = RESULTS_FOLDER / START_FOLDER if options.start_times else RESULTS_FOLDER
    out: Path = options.out or folder / f"{file_stem(results.gpu, results.torch)}.json"
    done: set[str] = set()
    if out.exists() and (options.resume or (not options.out and len(names) < len(workloads))):
        before = Results.read(out)
        differ = ", ".join(results.differs_in(before))
        if differ and not options.resume:
            print(f"{out} has other workloads, and differs in {differ}: name another with --out")
            return 2
        if differ:
            print(f"{out} differs in {differ}; starting from scratch", flush=True)
        else:
            results = replace(results, records=before.records)
            done = before.finished(ways) if options.resume else done
    for name in sorted(done.intersection(names), key=names.index):
        print(f"{name}: measured before", flush=True)
    left = [name for name in names if name not in done]
    # Caches are separate for each state of the code: the version alone stays the same.
    caches = None if options.caches is None else str(options.caches.resolve() / results.code_hash[:12])
    gpus, size = options.gpus, max(options.jobs, options.gpus)
    jobs = [
        Job(
            name,
            workloads[name].mode,
            workloads[name].batch,
            tuple(ways),
            effort,
            options.workloads,
            caches=caches,
            gpu=None if gpus == 1 else number % size % gpus,
            compile_threads=None if size == 1 else max(2, (os.cpu_count() or 1) // size),
        )
        for number, name in enumerate(left)
    ]
    has_own_share = size == 1 or (options.start_times and size == gpus)  # of the cores
    is_compiling_timed = has_own_share and caches is None
    for records in _in_batches(jobs, size, options.timeout, gpus):
        # Compile times are left out if the machine was shared with other workloads, or if a cache shortened them.
        if not is_compiling_timed:
            records = [replace(record, compile_s=None, record_s=None) for record in records]
        results = results.with_records(records)
        # Written after each workload, so an interrupted run keeps its measurements.
        results.write(out)
        out.with_suffix(".md").write_text(_page(results, _tables(results.records)), encoding="utf-8")
        print(_tables(records), end="\n\n", flush=True)
    print(f"{out}\n{out.with_suffix('.md')}")
    if out.parent == folder:
        summary.main([])
    failed = [r for r in results.records if r.workload in names and r.error is not None]
    return 1 if failed else 0


def _in_batches(jobs: Sequence[Job], size: int, timeout_s: float, gpus: int = 1) -> Iterator[list[Measurement]]:
    """Yields the records of one workload after another.

    A batch is prepared together. Then its workloads are timed one by one, or as many at a time as there are GPUs; jobs
    without rounds are not timed.
    """
    is_timed = any(job.effort.rounds for job in jobs)
    for first in range(0, len(jobs), size):
        with contextlib.ExitStack() as stack:
            workers = [stack.enter_context(Worker(job, timeout_s)) for job in jobs[first : first + size]]
            for number, worker in enumerate(workers, first + 1):
                print(f"[{number}/{len(jobs)}] {jobs[number - 1].name}", flush=True)
                worker.prepare()
            for worker in workers:
                worker.wait_until_prepared(Progress() if size == 1 else None)
            for begin in range(0, len(workers), gpus):
                together = workers[begin : begin + gpus]
                if is_timed:
                    wait_until_quiet()
                show = Progress if gpus == 1 else lambda: None
                with ThreadPoolExecutor(gpus) as pool:
                    try:
                        yield from pool.map(lambda worker: worker.measure(show()), together)  # noqa: B023
                    except BaseException:  # otherwise the pool waits for workers that go on
                        for worker in together:
                            worker.end()
                        raise


def _tables(records: Sequence[Measurement]) -> str:
    """The tables of each workload, whose records follow each other."""
    return "\n\n".join(text_table(group) for _, group in itertools.groupby(records, lambda record: record.workload))


def _page(results: Results, tables: str) -> str:
    head = (
        f"# {results.gpu}, torch {results.torch}\n\n"
        f"Driver {results.driver}, triton {results.triton}, Python {results.python}; {results.date}; "
        f"{results.rounds} rounds; code {results.code_hash[:12]}.\n"
    )
    return f"{head}\n```\n{tables}\n```\n"


def wait_until_quiet(most_s: float = 15.0) -> None:
    """Returns once fewer than :data:`FEW_CORES` are busy, as compile workers are, or after ``most_s`` seconds."""
    end = time.monotonic() + most_s
    while time.monotonic() < end:
        at, before = time.monotonic(), _cpu_s()
        time.sleep(0.3)
        if (_cpu_s() - before) / (time.monotonic() - at) < FEW_CORES:
            return


def _cpu_s() -> float:
    """Processor time since the machine's start, without idle time."""
    words = Path("/proc/stat").read_text(encoding="ascii").splitlines()[0].split()
    ticks = [int(word) for word in words[1:9]]  # user, nice, system, idle, iowait, irq, softirq, steal
    return (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK")
