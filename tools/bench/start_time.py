"""Time from the start of a process to its first and third call, with torch's CUDA graphs and with ours.

usage: python tools/bench/start_time.py [NAMES ...] [--repeats N] [--seconds S] [--out FILE]
       for a trial: --smaller, --device cpu, and MLP and MLP-T among NAMES

Each figure is of a new process, with a cache folder for each way: *cold* processes find it empty and run together,
*warm* ones alternate. If the caches' counters differ between ways, the exit status is 1.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

from processes import end, end_on_termination, how_it_ended

WAYS = ("torch", "ours")
COUNTERS = {
    "inductor": ("fxgraph_cache_hit", "fxgraph_cache_miss", "fxgraph_cache_bypass"),
    "aot_autograd": (
        "autograd_cache_hit",
        "autograd_cache_miss",
        "autograd_cache_bypass",
        "autograd_cache_saved",
    ),
}
PERCEPTRONS = ("MLP", "MLP-T")  # two small layers, in inference and in training; not workloads
_CALLS = 3
_TIMEOUT_S = 600.0
_SMALLER: Mapping[str, Any] = {"batch": 2, "sequence": 32, "layers": 1, "hidden": 64}  # of a workload


class StartFailed(Exception):
    def __init__(self, job: Job, how: str) -> None:
        super().__init__(f"{job.name}, {job.way}, {job.stage}: {how}")


@dataclass(frozen=True, slots=True)
class Job:
    """The work of one process."""

    name: str  # of a workload, or of PERCEPTRONS
    way: str
    stage: str  # "cold" or "warm"
    device: str = "cuda"
    smaller: bool = False


@dataclass(frozen=True, slots=True)
class Start:
    """The times of one process: seconds from its start to the end of calls, and of parts of that."""

    name: str
    way: str
    stage: str
    first_s: float
    third_s: float
    import_s: float  # of this package, after torch; 0 without it
    call_s: float  # the first call alone, which compiles or loads the program
    counters: Mapping[str, int]


def run(job: Job, caches: Path) -> Start:
    """Runs one process with caches in ``caches``; raises :class:`StartFailed` if it fails."""
    (start,) = run_together([job], [caches])
    return start


def run_together(jobs: Sequence[Job], caches: Sequence[Path]) -> list[Start]:
    """Runs several processes at the same time."""
    with tempfile.TemporaryDirectory(prefix="start_time_") as name:
        running = []
        try:
            for number, (job, folder) in enumerate(zip(jobs, caches, strict=True)):
                out = Path(name) / f"{number}.json"
                running.append((job, out, _begin(job, folder, out)))
            return [_wait(job, out, process) for job, out, process in running]
        finally:
            for _, _, process in running:
                end(process)


def _begin(job: Job, caches: Path, out: Path) -> subprocess.Popen[bytes]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYGRAPH_")}
    environment["TORCHINDUCTOR_CACHE_DIR"] = str(caches / "inductor")
    environment["TRITON_CACHE_DIR"] = str(caches / "triton")
    with out.with_suffix(".log").open("wb") as log:
        begin = time.monotonic()  # the machine's clock, which the process can compare with
        request = json.dumps([asdict(job), begin, str(out)])
        return subprocess.Popen(
            [sys.executable, str(Path(__file__).resolve()), "--start", request],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def _wait(job: Job, out: Path, process: subprocess.Popen[bytes]) -> Start:
    try:
        status = process.wait(_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise StartFailed(job, f"it took more than {_TIMEOUT_S:.0f} s") from None
    if status != 0 or not out.exists():
        raise StartFailed(job, how_it_ended(status, out.with_suffix(".log")))
    return Start(**json.loads(out.read_text(encoding="utf-8")))


def start(job: Job, begin: float) -> Start:
    """Runs in the process itself: imports, builds and compiles the program, and calls it three times."""
    import torch

    imported = time.monotonic()
    if job.way == "ours":
        import pygraph_trees  # noqa: F401
    import_s = time.monotonic() - imported if job.way == "ours" else 0.0
    program = _program(job)
    compiled = torch.compile(program.fn, mode="reduce-overhead")
    ends = [time.monotonic()]
    for _ in range(_CALLS):
        program.step(compiled, program.args, program.kwargs)
        if job.device == "cuda":
            torch.cuda.synchronize()
        ends.append(time.monotonic())

    from torch._dynamo.utils import counters

    counted = {name: int(counters[kind][name]) for kind, names in COUNTERS.items() for name in names}
    return Start(job.name, job.way, job.stage, ends[1] - begin, ends[-1] - begin, import_s, ends[1] - ends[0], counted)


def _program(job: Job) -> Any:
    # A program needs one module of this package; the packages around it would import what is measured.
    for name in ("pygraph_trees", "pygraph_trees.benchmark"):
        if name not in sys.modules:
            package = ModuleType(name)
            package.__path__ = [str(ROOT / name.replace(".", "/"))]
            sys.modules[name] = package

    import torch

    from bench.loading import load_workloads
    from pygraph_trees.benchmark.program import Program

    if job.name in PERCEPTRONS:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8)).to(job.device)
        inputs = (torch.randn(16, 64, device=job.device),)
        is_training = job.name == "MLP-T"
        return Program(model, inputs, training=is_training, context=torch.enable_grad if is_training else torch.no_grad)
    return load_workloads()[job.name].build(job.device, **(_SMALLER if job.smaller else {}))


def measure(
    names: Sequence[str], folder: Path, *, repeats: int, seconds: float, device: str, smaller: bool
) -> list[Start]:
    """All processes of all workloads, in the order in which they ran."""
    begin = time.monotonic()
    found: list[Start] = []

    def job(name: str, way: str, stage: str) -> Job:
        return Job(name, way, stage, device, smaller)

    caches = {(name, way): folder / name / way for name in names for way in WAYS}
    found += run_together([job(name, way, "cold") for name, way in caches], list(caches.values()))
    print(f"cold: {time.monotonic() - begin:.1f} s", flush=True)
    for number in range(repeats):
        began = time.monotonic()
        for name in names:
            for way in WAYS[:: -1 if number % 2 else 1]:
                found.append(run(job(name, way, "warm"), caches[name, way]))
        took = time.monotonic() - began
        print(f"warm round {number + 1}: {took:.1f} s", flush=True)
        if number + 1 < repeats and time.monotonic() - begin + took > seconds:
            print(f"{seconds:.0f} s are not enough for another one", flush=True)
            break
    return found


def differing(found: Sequence[Start]) -> list[str]:
    """Differences of the caches' counters between the ways, or between warm processes of one way; a line each."""
    lines = []
    for name, stage in dict.fromkeys((one.name, one.stage) for one in found):
        by_way = {way: _counters(found, name, way, stage) for way in WAYS}
        if any(len(counted) != 1 for counted in by_way.values()) or len({*by_way["torch"], *by_way["ours"]}) != 1:
            told = "; ".join(f"{way} {' or '.join(counted)}" for way, counted in by_way.items())
            lines.append(f"{name}, {stage}: {told}")
    return lines


def _counters(found: Sequence[Start], name: str, way: str, stage: str) -> list[str]:
    """The distinct counters, without those that are 0."""
    these = [one for one in found if (one.name, one.way, one.stage) == (name, way, stage)]
    texts = [", ".join(f"{key} {value}" for key, value in one.counters.items() if value) for one in these]
    return list(dict.fromkeys(text or "none" for text in texts))


def summary(found: Sequence[Start]) -> list[dict[str, Any]]:
    """Medians by workload, stage and way; for ours, also the ratio to torch's seconds to the first and third call."""
    from statistics import median

    rows: list[dict[str, Any]] = []
    for name, stage in dict.fromkeys((one.name, one.stage) for one in found):
        torchs: dict[str, Any] | None = None
        for way in WAYS:
            these = [one for one in found if (one.name, one.stage, one.way) == (name, stage, way)]
            row: dict[str, Any] = {"workload": name, "stage": stage, "way": way, "processes": len(these)}
            for figure in ("first_s", "third_s", "call_s", "import_s"):
                row[figure] = median([getattr(one, figure) for one in these])
            row["ratio_first"] = None if torchs is None else row["first_s"] / torchs["first_s"]
            row["ratio_third"] = None if torchs is None else row["third_s"] / torchs["third_s"]
            row["counters"] = " or ".join(_counters(found, name, way, stage))
            torchs = torchs or row
            rows.append(row)
    return rows


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    lines = ["workload  stage  way    to call 1 s  to call 3 s  call 1 s  import s  x call 1  x call 3  n"]
    for row in rows:
        ratios = [f"{row[key]:8.2f}" if row[key] is not None else " " * 8 for key in ("ratio_first", "ratio_third")]
        lines.append(
            f"{row['workload']:8}  {row['stage']:5}  {row['way']:5}  {row['first_s']:11.2f}  {row['third_s']:11.2f}  "
            f"{row['call_s']:8.2f}  {row['import_s']:8.2f}  {ratios[0]}  {ratios[1]}  {row['processes']}"
        )
    lines += [f"{row['workload']}, {row['stage']}, {row['way']}: {row['counters']}" for row in rows]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", default=["BERT-I", "BERT"], metavar="NAMES", help="default: BERT-I BERT")
    parser.add_argument("--repeats", type=int, default=5, help="warm processes of each way (default 5)")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no warm round that would not fit")
    parser.add_argument("--smaller", action="store_true", help="BERTs of one small layer, for a try")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)

    from bench.figures import has_gpu, write_figures
    from bench.loading import load_workloads

    if options.device == "cuda" and not has_gpu():
        return 2
    known = [*PERCEPTRONS, *load_workloads()]
    if unknown := [name for name in options.names if name not in known]:
        parser.error(f"there is no workload {', '.join(unknown)}; there are {', '.join(known)}")
    how = {"repeats": options.repeats, "smaller": options.smaller, "device": options.device}
    with tempfile.TemporaryDirectory(prefix="start_time_", ignore_cleanup_errors=True) as folder:
        try:
            found = measure(options.names, Path(folder), seconds=options.seconds, **how)
        except StartFailed as failed:
            print(f"error: {failed}", file=sys.stderr)
            return 1
    rows, differences = summary(found), differing(found)
    print(table(rows))
    write_figures(options.out, rows, **how, processes=[asdict(one) for one in found])
    for line in differences:
        print(f"the caches' counters differ: {line}")
    return 1 if differences else 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--start"]:
        fields, begin_s, out_path = json.loads(sys.argv[2])
        taken = start(Job(**fields), begin_s)
        Path(out_path).write_text(json.dumps(asdict(taken)), encoding="utf-8")
    else:
        end_on_termination()
        sys.exit(main())
