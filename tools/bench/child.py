"""A script in a process and session of its own, which gets a job as JSON; lines of JSON go both ways.

The script reads commands on standard input and answers on standard output. Everything else that it prints is in a log.
A :class:`Child` that dies or is late answers with an error, and ``is_dead``. Ending it ends its compile workers too.
"""

from __future__ import annotations

import contextlib
import json
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from processes import end, how_it_ended

_POLL_S = 0.2


class Child:
    """The process of a script."""

    def __init__(self, script: Path, job: Mapping[str, Any], log: Path, environment: Mapping[str, str]) -> None:
        self._log = log
        with log.open("wb") as errors:
            self._process = subprocess.Popen(
                [sys.executable, str(script), json.dumps(job)],
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
            status = self._process.poll()  # of the process alone: its children may keep the pipe open
            with contextlib.suppress(queue.Empty):
                return self._answers.get(timeout=_POLL_S)
            if status is not None:
                return {"error": how_it_ended(status, self._log), "is_dead": True}
            if time.monotonic() >= until:
                return {"error": "no answer in time", "is_dead": True}

    def end(self) -> None:
        """Ends the process, once: the id of a process that has ended may be reused."""
        with self._ending:
            if self._has_ended:
                return
            end(self._process)
            self._has_ended = True
        self._follower.join(5)
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError):
                assert pipe is not None
                pipe.close()

    def _follow(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._answers.put(json.loads(line))
