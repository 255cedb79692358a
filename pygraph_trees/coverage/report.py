"""The report: what became of every compiled graph and function, as records, text and JSON.

:func:`report` takes a snapshot. Printing it gives tables that fit a terminal of 80 columns or more;
:meth:`Report.to_json` gives the records, with the names of :mod:`.records` as keys.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, dataclass

from .log import journal
from .records import Environment, FeatureState, FunctionRecord, GraphRecord
from .text import render


@dataclass(frozen=True, slots=True)
class Report:
    environment: Environment
    graphs: tuple[GraphRecord, ...]
    functions: tuple[FunctionRecord, ...]

    @property
    def recordings(self) -> int:
        return sum(len(f.recordings) for f in self.functions)

    @property
    def replays(self) -> int:
        return sum(f.replays for f in self.functions)

    def to_json(self) -> str:
        """All records as a JSON object with the keys ``environment``, ``graphs`` and ``functions``."""
        return json.dumps(asdict(self), indent=1)

    def to_text(self, width: int | None = None) -> str:
        """Tables of at most ``width`` columns (80 at least), the terminal's where it is not given."""
        columns = width or shutil.get_terminal_size((100, 24)).columns
        return render(self.environment, self.graphs, self.functions, max(80, columns))

    def __str__(self) -> str:
        return self.to_text()


def report() -> Report:
    """What happened so far to every graph and function that was compiled for CUDA graphs in this process."""
    graphs, functions = journal.records()
    return Report(_environment(), graphs, functions)


def clear() -> None:
    """Begins a new report: what was noted so far is forgotten, also of functions that are still in use."""
    journal.clear()


def _environment() -> Environment:
    import torch

    import inductor_patches
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
    return Environment(__version__, torch.__version__, triton_version, gpu, features)
