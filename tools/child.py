"""A script in a process and session of its own, which gets a job as JSON; lines of JSON go both ways.

The script reads commands on standard input and answers through :func:`answering`. Everything else that it prints is in
a log. A :class:`Child` that dies or is late answers with an error, and ``is_dead``. Ending it ends its compile workers
too.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from processes import end, how_it_ended

_POLL_S = 0.2


class Child:
    """The process of a script.

    Args:
        command: Python's arguments before the job.
    """

    def __init__(
        self, command: Sequence[str], job: Mapping[str, Any], log: Path, environment: Mapping[str, str]
    ) -> None:
        self._log = log
        with log.open("wb") as errors:
            self._process = subprocess.Popen(
                [sys.executable, *command, json.dumps(job)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=environment,
                text=True,
                start_new_session=True,
            )
        self._has_ended, self._ending = False, threading.Lock()
        self._answers: queue.Queue[dict[str, Any]] = queue.Queue()
        self._follower = threading.Thread(target=self._follow, daemon=True)
        self._follower.start()

    def tell(self, **command: Any) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # it has ended, as its answer will show
            self._process.stdin.write(json.dumps(command) + "\n")
            self._process.stdin.flush()

    def answer(self, until: float) -> dict[str, Any]:
        """Its next answer, or an error if it ends or gives none until ``until``, in seconds of the monotonic clock."""
        while True:
            status = self.status()
            with contextlib.suppress(queue.Empty):
                return self._answers.get(timeout=_POLL_S)
            if status is not None:
                return {"error": self.how_it_ended(), "is_dead": True}
            if time.monotonic() >= until:
                return {"error": "no answer in time", "is_dead": True}

    def answers(self) -> Iterator[dict[str, Any]]:
        """The answers so far that were not taken yet; all of them, if the process has ended."""
        if self.status() is not None:
            self._follower.join(_POLL_S)
        with contextlib.suppress(queue.Empty):
            while True:
                yield self._answers.get_nowait()

    def status(self) -> int | None:
        """The exit status of the process; None while it runs."""
        return self._process.poll()

    def how_it_ended(self, **kwargs: Any) -> str:
        return how_it_ended(self._process.wait(), self._log, **kwargs)

    def abort(self) -> str:
        """Ends the process; returns how, with what its threads were doing if it has Python's fault handler."""
        self._process.send_signal(signal.SIGABRT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(10)
        self.end()
        return self.how_it_ended(lines=250)

    def end(self) -> None:
        """Ends the process, once: the id of a process that has ended may be reused."""
        with self._ending:
            if self._has_ended:
                return
            end(self._process)
            self._has_ended = True
        self._follower.join(5)
        # A reader that still waits holds the pipe's lock.
        for pipe in (self._process.stdin, None if self._follower.is_alive() else self._process.stdout):
            with contextlib.suppress(OSError):
                if pipe is not None:
                    pipe.close()

    def _follow(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._answers.put(json.loads(line))


def answering() -> Callable[[Mapping[str, Any]], None]:
    """In the script: returns the function that sends an answer.

    Whatever else the process, its C code and its children print goes to standard error from now on.
    """
    pipe = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return lambda answer: print(json.dumps(answer), file=pipe, flush=True)
