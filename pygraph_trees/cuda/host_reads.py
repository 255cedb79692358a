"""When a program reads memory of the CPU that the GPU is given: what placement knows, and staging has to keep to."""

from __future__ import annotations

import enum


class HostRead(enum.IntEnum):
    """Numbers, as they stand in generated code."""

    AT_ONCE = 0  # at the call, as the CPU does, whatever the GPU has still to do
    IN_ORDER = 1  # by a copy that the program waits for, behind what its stream was given before
    LATER = 2  # by one that it does not wait for, so that it leaves pinned memory alone until then
