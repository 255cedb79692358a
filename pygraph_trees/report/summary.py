"""The report on every compiled graph and function, as records, text, HTML and JSON.

:func:`report` takes a snapshot of the process's logs. Printed, it gives tables that fit a terminal of 80 columns or
more. :meth:`Report.to_json` gives the records, with the names of ``records`` as keys.
"""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from .log import journal
from .partitions import source_line
from .records import Environment, FeatureState, FunctionRecord, GraphBreak, GraphRecord
from .text import render


@dataclass(frozen=True, slots=True)
class Report:
    environment: Environment
    graphs: tuple[GraphRecord, ...]
    functions: tuple[FunctionRecord, ...]
    breaks: tuple[GraphBreak, ...] = ()

    @property
    def recordings(self) -> int:
        return sum(len(f.recordings) for f in self.functions)

    @property
    def replays(self) -> int:
        return sum(f.replays for f in self.functions)

    def to_json(self) -> str:
        """All records as a JSON object with the keys ``environment``, ``graphs``, ``functions`` and ``breaks``."""
        return json.dumps(asdict(self), indent=1)

    def to_text(self, width: int | None = None) -> str:
        """Tables of at most ``width`` columns, but at least 80; by default the terminal's width."""
        columns = width or shutil.get_terminal_size((100, 24)).columns
        return render(self.environment, self.graphs, self.functions, max(80, columns), self.breaks)

    def to_html(self, path: str | Path | None = None) -> str:
        """The report as a self-contained page for a browser, also written to ``path`` if given."""
        from .page import page

        text = page(self)
        if path is not None:
            Path(path).write_text(text, encoding="utf-8")
        return text

    def __str__(self) -> str:
        return self.to_text()


def report() -> Report:
    """The report on every graph and function that this process has compiled for CUDA graphs so far."""
    graphs, functions = journal.records()
    return Report(_environment(), graphs, functions, tuple(_breaks()))


def clear() -> None:
    """Begins a new report without the facts so far, including those of functions still in use."""
    journal.clear()
    _breaks_before.clear()
    _breaks_before.update(_counted_breaks())


_breaks_before: Counter[str] = Counter()  # excluded from a new report


def _counted_breaks() -> Counter[str]:
    from torch._dynamo.utils import counters

    # Only the second counter has what a compiler could not do.
    return Counter(counters["graph_break"]) | Counter(counters["unimplemented"])


def _breaks() -> Iterator[GraphBreak]:
    for text, count in (_counted_breaks() - _breaks_before).items():
        lines = [line.strip() for line in text.splitlines()]
        why = next((line.removeprefix("Explanation: ") for line in lines if line.startswith("Explanation: ")), None)
        trace = text.partition("Original traceback:")[2].partition("\n\n")[0]
        yield GraphBreak(lines[0] if why is None else f"{lines[0]}: {why}", source_line(trace), count)


def _environment() -> Environment:
    import torch

    import inductor_patches
    from pygraph_trees.native.build import status
    from pygraph_trees.version import __version__

    try:
        import triton

        triton_version: str | None = triton.__version__
    except ImportError:
        triton_version = None
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    features = tuple(
        FeatureState(s.feature, s.state, "; ".join(s.mismatches) or None) for s in inductor_patches.status()
    )
    return Environment(__version__, torch.__version__, triton_version, gpu, features, status())
