"""Waits until a machine has little to do, for example because compile workers have finished starting.

:func:`wait_until_quiet` reads the machine's processor time and returns as soon as few cores are busy, or at a time
limit, and says which. If the processor time is unknown, it does not wait.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

_STAT = Path("/proc/stat")
_LOOK_S = 0.3
FEW_CORES = 1.0


def wait_until_quiet(most_s: float = 15.0) -> bool:
    """Returns once fewer than :data:`FEW_CORES` are busy, or after ``most_s`` seconds; says whether they are."""
    begin = time.monotonic()
    while True:
        at, before = time.monotonic(), cpu_s()
        if before is None:
            return True
        time.sleep(_LOOK_S)
        after = cpu_s()
        if after is None or (after - before) / max(time.monotonic() - at, 1e-9) < FEW_CORES:
            return True
        if time.monotonic() - begin >= most_s:
            return False


def cpu_s() -> float | None:
    """Processor time since the machine's start, without idle time; None if Linux does not report it."""
    try:
        words = _STAT.read_text(encoding="ascii").splitlines()[0].split()
    except (OSError, IndexError):
        return None
    ticks = [int(word) for word in words[1:9]]  # user, nice, system, idle, iowait, irq, softirq, steal
    return (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK")
