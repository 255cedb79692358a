"""The report on every compiled graph and function, as records, text, HTML and JSON.

:func:`report` takes a snapshot of the process's logs. Printed, it gives tables that fit a terminal of 80 columns or
more. Its JSON has the keys ``environment``, ``graphs``, ``functions`` and ``breaks``.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch

from pygraph_trees.version import __version__, triton_version

from . import breaks
from .log import journal
from .markup import Shown, preformatted
from .page import page
from .records import Environment, FeatureState, FunctionRecord, HostWork, Snapshot
from .text import called, counted, nbytes, render

_NOTEBOOK = 120  # columns
_FIGURES: tuple[tuple[str, Callable[[FunctionRecord], str]], ...] = (
    ("recordings", lambda f: str(len(f.recordings))),
    ("replays", lambda f: str(f.replays)),
    ("calls un-graphed", lambda f: str(f.ungraphed_calls)),
    ("copied at each replay", lambda f: nbytes(f.recordings[-1].copied_bytes) if f.recordings else "nothing"),
    ("graph pool", lambda f: nbytes(f.pool_bytes)),
)


@dataclass(frozen=True, slots=True)
class Report(Snapshot, Shown):
    """What happened so far, as records that can be printed, saved and shown in a browser."""

    def to_text(self, width: int | None = None) -> str:
        """Tables of at most ``width`` columns, but at least 80; by default the terminal's width."""
        return render(self, max(80, width or shutil.get_terminal_size((100, 24)).columns))

    def _page(self) -> str:
        return page(self)

    def diff(self, earlier: Snapshot) -> str:
        """What changed since an earlier report, a line for each function; empty if nothing did."""
        return "\n".join(_changes(earlier, self))

    def _repr_html_(self) -> str:
        return preformatted(self.to_text(_NOTEBOOK))


def _changes(before: Snapshot, after: Snapshot) -> Iterator[str]:
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
        if differ := [f"{figure} {was} → {now}" for figure, was, now in shown if was != now]:
            yield f"{name}: {', '.join(differ)}"
    for name, left in earlier.items():
        yield from (f"{name}: gone" for _ in left)


def report(features: tuple[FeatureState, ...], native: str, host_work: Mapping[str, HostWork]) -> Report:
    """The report on all that this process has compiled; ``host_work``: by the field of :class:`.Environment`."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    environment = Environment(__version__, torch.__version__, triton_version(), gpu, features, native, **host_work)
    return Report(environment, *journal.records(), breaks.records())


def clear() -> None:
    """Begins a new report without the facts so far, including those of functions still in use."""
    journal.clear()
    breaks.noted.clear()
