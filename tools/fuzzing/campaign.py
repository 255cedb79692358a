"""Checks random cases for a given time, in worker processes that may die.

The worker writes each case to a file before it runs it, and makes one that fails smaller itself. Where the process
dies, or a fault has made the GPU unusable to it, the last case is taken from the file and made smaller in processes of
their own. Nothing is kept between campaigns: a seed gives the same cases.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from .case import Case, read
from .reduction import reduce

WORKER = Path(__file__).parent / "worker.py"
POISONED = 70  # exit status of a worker whose GPU context is lost
FAILED = 1  # of one that found a failure and wrote it down
_POLL_S = 0.2
_LONGEST_CASE_S = 180.0  # without a sign of life, which a case gives when it begins
_MOST_TRIES, _MOST_S = 40, 240.0  # to make a deadly case smaller
_TAIL = 12  # lines


@dataclass(frozen=True, slots=True)
class Plan:
    """What is checked, and for how long."""

    device: str
    under_test: str
    control: str | None
    exact: bool
    seconds: float
    seed: int
    most_cases: int | None = None


@dataclass(slots=True)
class Counts:
    """What was run so far."""

    cases: int = 0
    calls: int = 0
    invalid: int = 0  # eager could not run them
    torch_differs: int = 0  # torch's compiler without graphs differs from eager in the same way
    replays: int = 0
    recordings: int = 0
    ungraphed_calls: int = 0

    def add(self, other: Counts) -> None:
        for name, value in asdict(other).items():
            setattr(self, name, getattr(self, name) + value)

    def __str__(self) -> str:
        text = f"{self.cases} programs, {self.calls} calls"
        if self.recordings or self.replays:
            text += f"; {self.replays} replays of {self.recordings} recordings, {self.ungraphed_calls} calls un-graphed"
        if self.torch_differs:
            text += f"; {self.torch_differs} where torch.compile without graphs differs from eager as well"
        if self.invalid:
            text += f"; {self.invalid} that eager cannot run"
        return text


@dataclass(frozen=True, slots=True)
class Failure:
    case: Case
    message: str


@dataclass(slots=True)
class Outcome:
    counts: Counts = field(default_factory=Counts)
    failure: Failure | None = None


def run(plan: Plan, progress: Callable[[float, float, str], None]) -> Outcome:
    """Checks cases until the time is over or one fails.

    Args:
        progress: told seconds gone, seconds in all, and the counts as text, a few times a second.
    """
    outcome, start, seed = Outcome(), time.monotonic(), plan.seed
    while outcome.failure is None:
        left = plan.seconds - (time.monotonic() - start)
        rest = None if plan.most_cases is None else plan.most_cases - outcome.counts.cases
        if left <= 0 or rest == 0:
            break

        def tell(counts: Counts) -> None:
            seen = Counts()
            seen.add(outcome.counts)
            seen.add(counts)
            # Less than all, which is told once, at the end.
            progress(min(plan.seconds * 0.999, time.monotonic() - start), plan.seconds, str(seen))

        with _Worker(plan, left, seed, rest) as worker:
            message = worker.follow(tell)
            outcome.counts.add(worker.counts())
            outcome.failure = worker.failure()
            if outcome.failure is None and message is not None:
                outcome.failure = _died(plan, worker.last_case(), message)
        seed += 1
    progress(plan.seconds, plan.seconds, str(outcome.counts))
    return outcome


def _died(plan: Plan, case: Case | None, message: str) -> Failure:
    if case is None:
        raise RuntimeError(f"the worker died before its first case:\n{message}")

    def fails(smaller: Case) -> bool:
        with _Worker(plan, 0.0, 0, 1, smaller) as worker:
            return worker.follow(lambda counts: None) is not None or worker.failure() is not None

    return Failure(reduce(case, fails, _MOST_TRIES, _MOST_S), message)


class _Worker:
    """A worker process with its folder."""

    def __init__(self, plan: Plan, seconds: float, seed: int, most: int | None, case: Case | None = None) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="fuzz_")
        self._path = Path(self._folder.name)
        if case is not None:
            (self._path / "given.py").write_text(case.text(), encoding="utf-8")
        told = {**asdict(plan), "seconds": seconds, "seed": seed, "most_cases": most, "folder": self._folder.name}
        self._log = (self._path / "log.txt").open("wb")
        self._process = subprocess.Popen(
            [sys.executable, "-X", "faulthandler", str(WORKER), json.dumps(told)],
            stdout=self._log,
            stderr=self._log,
            start_new_session=True,  # its compile workers end with it
        )

    def __enter__(self) -> _Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self._kill()
        self._log.close()
        self._folder.cleanup()

    def follow(self, tell: Callable[[Counts], None]) -> str | None:
        """Waits for the end; what killed the process, None where it ended as it should."""
        while (status := self._process.poll()) is None:
            time.sleep(_POLL_S)
            tell(self.counts())
            if self._silent_s() > _LONGEST_CASE_S:
                self._kill()
                return f"a case took longer than {_LONGEST_CASE_S:g} s"
        if status == 0 or (status == FAILED and self.failure() is not None):
            return None
        cause = f"signal {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
        lines = (self._path / "log.txt").read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return "\n".join([f"the process died with {cause}", *lines[-_TAIL:]])

    def counts(self) -> Counts:
        data = self._json("counts.json")
        return Counts() if data is None else Counts(**data)

    def failure(self) -> Failure | None:
        data = self._json("failure.json")
        return None if data is None else Failure(read(data["case"]), data["message"])

    def last_case(self) -> Case | None:
        path = self._path / "case.py"
        return read(path.read_text(encoding="utf-8")) if path.exists() else None

    def _json(self, name: str) -> dict[str, str] | None:
        path = self._path / name
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None

    def _silent_s(self) -> float:
        path = self._path / "case.py"
        return time.time() - (path if path.exists() else self._path).stat().st_mtime

    def _kill(self) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
