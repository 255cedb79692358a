"""Measures a program in four ways: eager, ``torch.compile``, upstream's CUDA graphs, ours.

:func:`compare` takes a :class:`Program` and returns one :class:`Measurement` for each way and regime of inputs.
README.md describes the protocol.
"""

from __future__ import annotations

from .measure import Comparison, Effort, compare
from .outcome import REGIMES, Measurement, text_table
from .program import Program
from .ways import WAYS

__all__ = ["REGIMES", "WAYS", "Comparison", "Effort", "Measurement", "Program", "compare", "text_table"]
