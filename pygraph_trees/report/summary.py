"""The report on every compiled graph and function, as records, text, HTML and JSON.

:func:`report` takes a snapshot of the process's logs. Printed, it gives tables that fit a terminal of 80 columns or
more. Its JSON has the keys ``environment``, ``graphs``, ``functions`` and ``breaks``.
"""

from __future__ import annotations

import shutil
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from pygraph_trees.version import __version__, triton_version

from .changes import changes
from .log import journal
from .markup import preformatted
from .naming import source_line
from .page import page
from .records import Environment, FeatureState, GraphBreak, Snapshot
from .shown import Shown
from .text import render

_NOTEBOOK = 120  # columns


@dataclass(frozen=True, slots=True)
class Report(Snapshot, Shown):
    """What happened so far, as records that can be printed, saved and shown in a browser."""

    def to_text(self, width: int | None = None) -> str:
        """Tables of at most ``width`` columns, but at least 80; by default the terminal's width."""
        columns = width or shutil.get_terminal_size((100, 24)).columns
        return render(self.environment, self.graphs, self.functions, max(80, columns), self.breaks)

    def _page(self) -> str:
        return page(self)

    def diff(self, earlier: Snapshot) -> str:
        """What changed since an earlier report, a line for each function; empty if nothing did."""
        return "\n".join(changes(earlier, self))

    def _repr_html_(self) -> str:
        return preformatted(self.to_text(_NOTEBOOK))


def report(features: tuple[FeatureState, ...], native: str) -> Report:
    """The report on every graph and function that this process has compiled for CUDA graphs so far.

    Args:
        features: their state.
        native: whether the native parts are used, and if not, why.
    """
    graphs, functions = journal.records()
    return Report(
        _environment(features, native), graphs, functions, tuple(breaks_in(_counted_breaks() - _breaks_before))
    )


def clear() -> None:
    """Begins a new report without the facts so far, including those of functions still in use."""
    journal.clear()
    _breaks_before.clear()
    _breaks_before.update(_counted_breaks())


_breaks_before: Counter[str] = Counter()  # excluded from a new report


def _counted_breaks() -> Counter[str]:
    dynamo = sys.modules.get("torch._dynamo.utils")
    if dynamo is None:
        return Counter()
    counters = dynamo.counters
    # Only the second counter has what a compiler could not do.
    return Counter(counters["graph_break"]) | Counter(counters["unimplemented"])


def breaks_in(counted: Mapping[str, int]) -> Iterator[GraphBreak]:
    """Graph breaks of Dynamo's descriptions and how often each occurred."""
    for text, count in counted.items():
        lines = [line.strip() for line in text.splitlines()]
        why = next((line.removeprefix("Explanation: ") for line in lines if line.startswith("Explanation: ")), None)
        trace = text.partition("Original traceback:")[2].partition("\n\n")[0]
        yield GraphBreak(lines[0] if why is None else f"{lines[0]}: {why}", source_line(trace), count)


def _environment(features: tuple[FeatureState, ...], native: str) -> Environment:
    import torch

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return Environment(__version__, torch.__version__, triton_version(), gpu, features, native)
