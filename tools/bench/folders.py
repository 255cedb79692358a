"""Where workloads and results are."""

from __future__ import annotations

from pathlib import Path

WORKLOADS_FOLDER = Path(__file__).parent / "workloads"
RESULTS_FOLDER = Path(__file__).parent / "results"
