"""Processes that may die: ended with all that they have started, and what is said of one that came to a bad end."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from pathlib import Path

_TAIL = 15  # lines of a dead process's output


def end(process: subprocess.Popen[str] | subprocess.Popen[bytes]) -> None:
    """Ends a process that has a session of its own, and what it has started there, also where it is gone itself."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def end_on_termination() -> None:
    """Has SIGTERM end this process as an interrupt does: what it has started in sessions of their own ends with it."""
    signal.signal(signal.SIGTERM, _terminated)


def _terminated(number: int, _: object) -> None:
    signal.signal(number, signal.SIG_IGN)  # ``timeout`` sends it twice, and what is cleaned up is not left half-way
    raise SystemExit(128 + number)


def how_it_ended(status: int, log: Path) -> str:
    """Signal or exit status of a dead process, and the end of its output."""
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-_TAIL:]
    return "\n".join([f"the process ended with {cause_of(status)}", *lines])


def cause_of(status: int) -> str:
    """Signal or exit status of a process, in words."""
    return f"signal {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
