"""Waits until a machine has little to do, for example because compile workers have finished starting.

:func:`wait_until_quiet` reads the machine's processor time from Linux, and returns as soon as few cores are busy, or at
a time limit.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

_STAT = Path("/proc/stat")
_LOOK_S = 0.3
FEW_CORES = 1.0


def wait_until_quiet(most_s: float = 15.0) -> None:
    """Returns once fewer than :data:`FEW_CORES` are busy, or after ``most_s`` seconds."""
    end = time.monotonic() + most_s
    while time.monotonic() < end:
        at, before = time.monotonic(), _cpu_s()
        time.sleep(_LOOK_S)
        if (_cpu_s() - before) / (time.monotonic() - at) < FEW_CORES:
            return


def _cpu_s() -> float:
    """Processor time since the machine's start, without idle time."""
    words = _STAT.read_text(encoding="ascii").splitlines()[0].split()
    ticks = [int(word) for word in words[1:9]]  # user, nice, system, idle, iowait, irq, softirq, steal
    return (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK")
