"""Differences between two reports: functions that are new, gone, or have other figures."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from .records import FunctionRecord, Snapshot
from .text import called, counted, nbytes

_FIGURES: tuple[tuple[str, Callable[[FunctionRecord], str]], ...] = (
    ("recordings", lambda f: str(len(f.recordings))),
    ("replays", lambda f: str(f.replays)),
    ("calls un-graphed", lambda f: str(f.ungraphed_calls)),
    ("copied at each replay", lambda f: nbytes(f.recordings[-1].copied_bytes) if f.recordings else "nothing"),
    ("graph pool", lambda f: nbytes(f.pool_bytes)),
)


def changes(before: Snapshot, after: Snapshot) -> Iterator[str]:
    """A line for each function that differs; functions are matched by name, mode and partition, in order."""
    earlier: dict[str, list[FunctionRecord]] = {}
    for function in before.functions:
        earlier.setdefault(called(function), []).append(function)
    for function in after.functions:
        name = called(function)
        if not earlier.get(name):
            recordings, replays = counted(len(function.recordings), "recording"), counted(function.replays, "replay")
            yield f"{name}: new, {recordings}, {replays}"
            continue
        other = earlier[name].pop(0)
        shown = [(figure, show(other), show(function)) for figure, show in _FIGURES]
        differ = [f"{figure} {was} → {now}" for figure, was, now in shown if was != now]
        if differ:
            yield f"{name}: {', '.join(differ)}"
    for name, left in earlier.items():
        yield from (f"{name}: gone" for _ in left)
