"""The time at which a program reads the CPU memory that it gives to the GPU.

Placement derives a :class:`HostRead` from the graph and writes it into generated code as a number, so the numbers must
not change. Staging must read the memory neither earlier nor later than the program does.
"""

from __future__ import annotations

import enum


class HostRead(enum.IntEnum):
    AT_ONCE = 0  # at the call, as the CPU reads, whatever work the GPU has left
    IN_ORDER = 1  # by a copy that the program waits for, after the earlier work of its stream
    LATER = 2  # by a copy without a wait: the program leaves the pinned memory alone until then
