"""Measures a program in four ways: eager, ``torch.compile``, upstream's CUDA graphs, ours.

:func:`compare` takes a :class:`Program` and returns one :class:`Measurement` for each way and regime of inputs. The
command line and the benchmark are built on it. ``table`` prints measurements; ``results`` keeps them in files.
README.md describes the protocol.
"""

from __future__ import annotations

from .measure import Comparison, compare
from .program import Program
from .results import REGIMES, Measurement, Results
from .table import text_table
from .timing import FULL, QUICK, Effort
from .ways import FORCED, MORE_WAYS, WAYS

__all__ = [
    "FORCED",
    "FULL",
    "MORE_WAYS",
    "QUICK",
    "REGIMES",
    "WAYS",
    "Comparison",
    "Effort",
    "Measurement",
    "Program",
    "Results",
    "compare",
    "text_table",
]
