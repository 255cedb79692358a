"""Measures everything, step by step, and continues after an interruption.

usage: python tools/bench/everything.py [STEPS ...] [--seconds S] [--list] [--again]

Each step runs its own script in a process of its own; figures go to ``tools/bench/results`` as JSON, output as text.
The page of results and the README's table come last. A step that is done for the same code, GPU and torch
(``done.txt``) is skipped without ``--again``. After ``--seconds``, the exit status is 3 and the same command continues.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

import torch
from processes import end, end_on_termination

from bench import RESULTS_FOLDER
from bench.figures import has_gpu, one_of, product_hash
from bench.result_files import file_stem

BENCH = ROOT / "tools" / "bench"
CACHES = Path(tempfile.gettempdir()) / "pygraph_trees_bench"  # compiling 25 workloads takes longer than timing them
TIME_IS_UP = 3  # exit status
_LEAST_S = 20.0  # no step begins with less time left
_CLEANUP_S = 10.0
_SHOWN = 40  # lines


@dataclass(frozen=True, slots=True)
class Step:
    """One measurement. In the command, ``{out}`` stands for the file of its figures, if it writes one."""

    name: str
    command: Sequence[str]
    doc: str
    is_printed: bool = True  # whether its output is a result
    goes_on: Sequence[str] = ()  # extra arguments that make it continue after an interruption


def _script(line: str) -> list[str]:
    name, *arguments = line.split()
    return [sys.executable, str(BENCH / name), *arguments]


def _program(name: str) -> Step:
    command = [sys.executable, "-m", "pygraph_trees", "compare", f"test/real_programs.py:{name}"]
    return Step(name, [*command, "--ways", "upstream,ours"], "a real program, against upstream")


# Many short rounds: other load of the host slows down all calls of a round, and the median ignores such rounds.
STEPS = (
    Step(
        "workloads",
        [sys.executable, str(BENCH), "--quick", "--rounds", "9", "--jobs", "13", "--caches", str(CACHES)],
        "all workloads, in four ways",
        is_printed=False,
        goes_on=["--resume"],
    ),
    Step(
        "graph-host",
        _script("graph_host.py MLP MLP-N BERT-I XLNET-I DLRM ALNET --rounds 15 --calls 20 --out {out}"),
        "the host's time for replays, of inference",
    ),
    Step(
        "graph-host-bert",
        _script("graph_host.py BERT --rounds 3 --calls 14 --out {out}"),
        "the host's time for replays, of a training step",
    ),
    Step("many", _script("many.py --out {out}"), "replays among many functions, and among many recordings"),
    Step("training-loops", _script("training_loops.py --out {out}"), "training loops as people write them"),
    Step("routes", _script("routes.py --rounds 9 --out {out}"), "routes of inputs against each other"),
    *map(_program, ("relative_positions", "noise_schedule", "mask_of_lengths", "numpy_positions", "tokens")),
    Step("summary", _script("summary.py"), "the page of results and the README's table", is_printed=False),
)


class Done:
    """The steps that are done, kept in a file."""

    def __init__(self, path: Path, of: Mapping[str, str]) -> None:
        """``of`` identifies what the results are of; steps done for anything else do not count."""
        self._path, self._of = path, dict(of)
        try:
            known = json.loads(path.read_text(encoding="utf-8"))
        except (FileNotFoundError, ValueError):  # no file, or a damaged one
            known = {}
        self._seconds: dict[str, float] = known["seconds"] if known.get("of") == self._of else {}

    def __contains__(self, name: str) -> bool:
        return name in self._seconds

    def add(self, name: str, seconds: float) -> None:
        self._seconds[name] = round(seconds, 1)
        text = json.dumps({"of": self._of, "seconds": self._seconds}, indent=1) + "\n"
        partial = self._path.with_suffix(".part")
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, self._path)


def run_all(
    steps: Sequence[Step],
    folder: Path,
    stem: str,
    done: Done,
    *,
    again: bool = False,
    left_s: Callable[[], float] = lambda: math.inf,
) -> int:
    """Runs the steps; returns 0, 1 if a step failed, or the status for time that is up.

    Args:
        stem: the beginning of file names.
        left_s: the seconds that are left.
    """
    failed = []
    for step in steps:
        if step.name in done and not again:
            print(f"{step.name}: done before", flush=True)
            continue
        if left_s() < _LEAST_S:
            print(f"{step.name}: the time is up; the same command goes on from here", flush=True)
            return TIME_IS_UP
        print(f"{step.name}: {step.doc}", flush=True)
        begin = time.monotonic()
        status = _run(step, folder, stem, left_s(), [] if again else step.goes_on)
        took_s = time.monotonic() - begin
        if status is None:
            print(f"{step.name}: cut after {took_s:.0f} s, as the time is up", flush=True)
            return TIME_IS_UP
        if status == 0:
            done.add(step.name, took_s)
            print(f"{step.name}: done in {took_s:.0f} s", flush=True)
        else:
            failed.append(step.name)
            print(f"{step.name}: exit status {status} after {took_s:.0f} s", flush=True)
    if failed:
        print(f"failed: {', '.join(failed)}", flush=True)
    return 1 if failed else 0


def _run(step: Step, folder: Path, stem: str, left_s: float, more: Sequence[str]) -> int | None:
    """Runs a step; returns its exit status, None if interrupted. Shows the end of its output, and keeps all of it."""
    out, printed = (folder / f"{stem}-{step.name}{suffix}" for suffix in (".json", ".txt"))
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            [part.replace("{out}", str(out)) for part in (*step.command, *more)],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": paths, "PYTHONUNBUFFERED": "1"},
            stdin=subprocess.DEVNULL,
            stdout=output,
            start_new_session=True,
            # A process that a shell starts in the background ignores interrupts, and so would its children.
            preexec_fn=functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
        )
        try:
            status: int | None = process.wait(None if math.isinf(left_s) else left_s)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGINT)  # lets it end what it started in other sessions
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_CLEANUP_S)
            end(process)
        output.seek(0)
        text = output.read().decode("utf-8", errors="replace")
    if step.is_printed and status == 0:
        printed.write_text(text, encoding="utf-8")
    print("\n".join(f"  {line}" for line in text.splitlines()[-_SHOWN:]), flush=True)
    return status


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    known = {step.name: step for step in STEPS}
    parser.add_argument("steps", nargs="*", metavar="STEPS", type=one_of(known), help="all of them by default")
    parser.add_argument("--seconds", type=float, default=math.inf, metavar="S", help="how long it may take")
    parser.add_argument("--list", action="store_true", help="show the steps and do nothing")
    parser.add_argument("--again", action="store_true", help="also what is done")
    options = parser.parse_args(arguments)
    if options.list:
        width = max(map(len, known))
        print("\n".join(f"{step.name:{width}}  {step.doc}" for step in STEPS))
        return 0
    begin = time.monotonic()
    if not has_gpu():
        return 2
    gpu, version = torch.cuda.get_device_name(), str(torch.__version__)
    done = Done(RESULTS_FOLDER / "done.txt", {"gpu": gpu, "torch": version, "code_hash": product_hash()})
    steps = [known[name] for name in options.steps] or list(STEPS)
    left_s = lambda: options.seconds - (time.monotonic() - begin)  # noqa: E731
    return run_all(steps, RESULTS_FOLDER, file_stem(gpu, version), done, again=options.again, left_s=left_s)


if __name__ == "__main__":
    end_on_termination()
    sys.exit(main())
