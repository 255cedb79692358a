"""Processes that may die: how they are ended with their children, and how a failure is described."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from pathlib import Path


def end(process: subprocess.Popen[str] | subprocess.Popen[bytes]) -> None:
    """Ends a process with its own session, and all processes in that session, even if it has already ended itself."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(30)  # a driver may hold a process for long


def end_on_termination() -> None:
    """Makes SIGTERM end this process as an interrupt does, so that children in their own sessions end too."""
    signal.signal(signal.SIGTERM, _terminated)


def _terminated(number: int, _: object) -> None:
    signal.signal(number, signal.SIG_IGN)  # ``timeout`` sends it twice; the second must not interrupt the cleanup
    raise SystemExit(128 + number)


def how_it_ended(status: int, log: Path, lines: int = 15) -> str:
    """The signal or exit status of a dead process, and the last ``lines`` of its output."""
    last = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-lines:]
    return "\n".join([f"the process ended with {cause_of(status)}", *last])


def cause_of(status: int) -> str:
    """The signal or exit status of a process, in words."""
    return f"signal {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
