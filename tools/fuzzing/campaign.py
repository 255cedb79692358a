"""Checks random cases for a given time, in worker processes that may die.

A worker sends each case before it runs it, and makes a failing case smaller itself. If the process dies or loses the
GPU, its last case is made smaller in other processes. If eager lost the GPU, or the control also dies
of the case, another worker replaces it, as after a failure if more failures are wanted. A seed and a program's number
give the same case, whichever worker checks it.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from child import Child
from torch._inductor.cpu_vec_isa import valid_vec_isa_list

from .case import Case, read
from .check import UNGRAPHED
from .everything import ENVIRONMENT
from .reduction import reduce
from .uses import USES

WORKER = "fuzzing.worker"
TOOLS = Path(__file__).resolve().parents[1]
POISONED = 70  # exit status of a worker whose GPU context is lost
POISONED_BY_EAGER = 71  # exit status of a worker whose GPU context eager lost
FAILED = 1  # exit status of a worker that found and sent a failure
_POLL_S = 0.2
_LONGEST_START_S = 300.0  # on a busy machine with cold disks
_MOST_TRIES = 40  # to make a deadly case smaller


@dataclass(frozen=True, slots=True)
class Campaign:
    """The subject and the limits of a campaign."""

    device: str
    under_test: str
    control: str | None
    seconds: float
    seed: int
    most_cases: int | None = None
    jobs: int = 1  # worker processes at a time
    most_failures: int = 1
    reduce_s: float = 120.0  # to make a failing case smaller
    longest_call_s: float = 90.0  # which compiles
    everything: bool = False  # with what is off by default (everything.py)
    left_out: tuple[int, ...] = ()  # numbers of programs, which count as ones that eager cannot run


@dataclass(slots=True)
class Counts:
    """The counts so far."""

    cases: int = 0
    calls: int = 0
    inside: int = 0  # calls from hooks and finalizers, and beside others
    caught: int = 0  # faults that ended a call
    invalid: int = 0  # eager could not run them
    torch_differs: int = 0  # the control differs from eager as well
    replays: int = 0
    recordings: int = 0
    on_lanes: int = 0  # recordings with kernels side by side
    as_chain: int = 0  # calls with the bits that the captured order gives
    unguarded: int = 0  # calls without Dynamo's guards
    uses: dict[str, int] = field(default_factory=dict)  # programs that eager can run, by the features they use
    ungraphed: dict[str, int] = field(default_factory=dict)  # calls, by the reason without its digits
    examples: dict[str, int] = field(default_factory=dict)  # for each of these reasons, the number of a program

    def add(self, other: Counts) -> None:
        examples = other.examples | self.examples
        for name, value in asdict(other).items():
            own = getattr(self, name)
            setattr(self, name, own + value if isinstance(value, int) else dict(Counter(own) + Counter(value)))
        self.examples = examples

    def __str__(self) -> str:
        told = {
            "from inside others": self.inside,
            "faults": self.caught,
            "replays": self.replays,
            "recordings": self.recordings,
            "recordings on lanes": self.on_lanes,
            "calls un-graphed": sum(self.ungraphed.values()),
            "calls with the chain's bits": self.as_chain,
            "calls without guards": self.unguarded,
            "programs where torch differs from eager as well": self.torch_differs,
            "that eager cannot run": self.invalid,
        }
        found = [f"{count} {what}" for what, count in told.items() if count]
        return ", ".join([f"{self.cases} programs", f"{self.calls} calls", *found])

    def table(self) -> str:
        """Lines: how many programs use each feature, and the most frequent reasons for un-graphed calls."""
        lines = [f"{self.uses.get(use, 0):6} programs with {use}" for use in USES]
        for why, count in Counter(self.ungraphed).most_common(12):
            lines.append(f"{count:6} calls un-graphed, as in program {self.examples[why]}: {why}")
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class Failure:
    case: Case
    message: str
    number: int = 0  # of the program


@dataclass(slots=True)
class Outcome:
    counts: Counts = field(default_factory=Counts)
    failures: list[Failure] = field(default_factory=list)


def run(
    campaign: Campaign, progress: Callable[[float, float, str], None], failed: Callable[[Failure], None]
) -> Outcome:
    """Checks cases until the time is over, enough have failed, or an interrupt or SIGTERM comes.

    Args:
        progress: called with seconds gone, total seconds, and the counts as text, a few times a second.
        failed: called with a failure once it is made smaller.

    Raises:
        RuntimeError: a worker cannot work at all.
    """
    outcome, start, stopped = Outcome(), time.monotonic(), threading.Event()
    with ThreadPoolExecutor() as judges, contextlib.ExitStack() as stack:
        stack.callback(stopped.set)  # after an error
        jobs = campaign.jobs
        most = [None if campaign.most_cases is None else len(range(n, campaign.most_cases, jobs)) for n in range(jobs)]
        workers = [stack.enter_context(_Worker(campaign, campaign.seconds, n, most[n])) for n in range(jobs)]
        judged: dict[Future[tuple[bool, Failure | None]], _Worker] = {}  # workers that have ended
        with contextlib.suppress(KeyboardInterrupt, SystemExit):  # what was found until then counts
            while (workers or judged) and len(outcome.failures) < campaign.most_failures:
                time.sleep(_POLL_S)
                seen = replace(outcome.counts)
                for worker in workers:
                    seen.add(worker.counts())
                gone = time.monotonic() - start  # the total is reported once, at the end
                progress(gone, max(campaign.seconds, gone + 1), f"{seen}; {len(workers)} workers, {len(judged)} judged")
                for worker in [w for w in workers if w.ended()]:
                    workers.remove(worker)
                    outcome.counts.add(worker.counts())
                    judged[judges.submit(_judged, campaign, worker, stopped)] = worker
                for verdict in [v for v in judged if v.done()]:
                    worker, (by_torch, failure) = judged.pop(verdict), verdict.result()
                    outcome.counts.torch_differs += by_torch and not worker.lost_by_eager
                    if failure is not None:
                        outcome.failures.append(failure)
                        failed(failure)
                    left, share = campaign.seconds - (time.monotonic() - start), worker.share_left()
                    has_died = worker.cause is not None or worker.lost_by_eager
                    if (has_died or failure is not None) and left > 0 and share != 0:
                        workers.append(stack.enter_context(_Worker(campaign, left, worker.number + jobs, share)))
        stopped.set()  # nobody judges any longer
        for worker in workers:
            outcome.counts.add(worker.counts())
            judges.submit(worker.end)  # all at once: the driver may hold each for a second
    progress(campaign.seconds, campaign.seconds, str(outcome.counts))
    return outcome


def _judged(campaign: Campaign, worker: _Worker, stopped: threading.Event) -> tuple[bool, Failure | None]:
    """Whether torch ended a worker, and otherwise its failure, if any; may take minutes."""
    if worker.cause is not None:
        case = worker.last_case()
        text = "" if case is None else case.text()
        print(f"program {worker.number} ended its process: {worker.cause}\n{text}", file=sys.stderr, flush=True)
    by_torch = worker.lost_by_eager or _control_fails(campaign, worker, stopped)
    return by_torch, None if by_torch else _failure(campaign, worker, stopped)


def _control_fails(campaign: Campaign, worker: _Worker, stopped: threading.Event) -> bool:
    """Whether the case that killed a worker also kills one that runs the control, un-graphed code, or torch's trees.

    An error that a worker raised is torch's if the control raises the same in a process where no kernel is tuned yet.
    """
    if campaign.control is None:
        return False
    if worker.cause is None:
        failure = worker.failure()
        if failure is None or not (raised := _raised(failure)):
            return False
        with _alone(replace(campaign, under_test=campaign.control, control=None), failure.case, stopped) as single:
            return (theirs := single.failure()) is not None and _raised(theirs) == raised
    if (case := worker.last_case()) is None:
        return False
    for way in dict.fromkeys((campaign.control, UNGRAPHED, "upstream" if campaign.device == "cuda" else UNGRAPHED)):
        with _alone(replace(campaign, under_test=way, control=None), case, stopped) as single:
            if single.cause is not None:
                return True
    return False


def _raised(failure: Failure) -> list[Any]:
    """Type and text of the error of a way that raised."""
    return re.findall(r"^call \d+: \w+ raised (\w+) at [^ ]*: (.*)", failure.message)


@contextlib.contextmanager
def _alone(campaign: Campaign, case: Case, stopped: threading.Event) -> Iterator[_Worker]:
    """A worker that has run one case and has ended. Raises InterruptedError once the campaign is stopped."""
    with _Worker(campaign, 0.0, 0, 1, case) as single:
        while not single.ended():
            if stopped.wait(_POLL_S):
                raise InterruptedError
        yield single


def _failure(campaign: Campaign, worker: _Worker, stopped: threading.Event) -> Failure | None:
    """The failure of a worker that has ended, if any."""
    if worker.cause is None:
        failure = worker.failure()
        if failure is None:
            return None
        with _alone(campaign, failure.case, stopped) as single:
            if single.cause is None and single.failure() is None:
                return replace(failure, message=f"{failure.message} (but not in a process of its own)")
        return failure
    case = worker.last_case()
    if case is None:
        raise RuntimeError(f"the worker died before its first case: {worker.cause}")

    def fails(smaller: Case) -> bool:
        with _alone(campaign, smaller, stopped) as single:
            return single.cause is not None or single.failure() is not None

    if worker.is_late:  # each try to make the case smaller would take as long
        again = "" if fails(case) else " (but not in a process of its own: perhaps the machine was busy)"
        return Failure(case, worker.cause + again, worker.number)
    return Failure(reduce(case, fails, _MOST_TRIES, 2 * campaign.reduce_s), worker.cause, worker.number)


@functools.cache
def vector_instructions() -> list[str]:
    """Those that work here.

    Inductor finds out by processes that it starts under a lock: if each worker asked, all would wait, minutes in all.
    """
    return list(map(str, valid_vec_isa_list()))


def _gpus_of(number: int) -> dict[str, str]:
    """What lets a worker see two GPUs, so that all are used evenly."""
    count = torch.cuda.device_count()
    if count < 2:
        return {}
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = named.split(",") if named else list(map(str, range(count)))  # there are none after the first that is missing
    return {"CUDA_VISIBLE_DEVICES": f"{gpus[number % count]},{gpus[(number + 1) % count]}"}


class _Worker:
    """A worker process; ``cause`` says what killed it."""

    def __init__(
        self, campaign: Campaign, seconds: float, first: int, most: int | None, case: Case | None = None
    ) -> None:
        self.cause: str | None = None
        self.lost_by_eager = self.is_late = False
        self._first, self._most = first, most
        self._longest_s = campaign.longest_call_s
        self._sent: dict[str, Any] = {}  # the latest case, counts and failure
        self._alive_at = time.monotonic()
        limits = {"seconds": seconds, "number": first, "most_cases": most}
        job = {**asdict(campaign), **limits, "vector_instructions": vector_instructions()}
        # Several workers fill the machine: pools of compile processes and threads would wait for each other.
        more = {"TORCHINDUCTOR_COMPILE_THREADS": "1", "OMP_NUM_THREADS": "1"} if campaign.jobs > 1 else {}
        more |= ENVIRONMENT if campaign.everything else {}
        path = os.pathsep.join(filter(None, [str(TOOLS), str(TOOLS.parent), os.environ.get("PYTHONPATH")]))
        self._folder = tempfile.TemporaryDirectory(prefix="fuzz_")
        self._child = Child(
            ["-X", "faulthandler", "-m", WORKER],
            {**job, "case": None if case is None else case.text()},
            Path(self._folder.name) / "log.txt",
            {**os.environ, "PYTHONPATH": path, **more, **_gpus_of(first)},
        )

    def __enter__(self) -> _Worker:
        return self

    def end(self) -> None:
        self._child.end()

    def __exit__(self, *_: object) -> None:
        self.end()
        self._folder.cleanup()

    def ended(self) -> bool:
        """Whether the process has ended; ends it if it gives no sign of life."""
        status = self._child.status()
        for sent in self._child.answers():
            self._sent |= sent
            self._alive_at = time.monotonic()
        longest_s, cause = self._longest_s if "case" in self._sent else _LONGEST_START_S, None
        if status is None:
            if time.monotonic() - self._alive_at <= longest_s:
                return False
            cause = f"a call took longer than {longest_s:g} s: {self._child.abort()}"
        if self.failure() is not None:  # even if it died while reducing the case
            return True
        if status == POISONED_BY_EAGER:
            self.lost_by_eager = True
        elif status != 0:
            self.is_late = status is None
            self.cause = cause or self._child.how_it_ended(lines=400)
        return True

    @property
    def number(self) -> int:
        """The number of its last program."""
        return int(self._sent.get("number", self._first))

    def share_left(self) -> int | None:
        """The number of cases that it has not reached; None if only time is limited."""
        return None if self._most is None else max(0, self._most - self.counts().cases)

    def counts(self) -> Counts:
        return Counts(**self._sent.get("counts", {}))

    def failure(self) -> Failure | None:
        found = self._sent.get("failure")
        return None if found is None else Failure(read(found["case"]), found["message"], self.number)

    def last_case(self) -> Case | None:
        return read(self._sent["case"]) if "case" in self._sent else None
