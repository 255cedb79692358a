"""Where workloads and results are."""

from __future__ import annotations

from pathlib import Path

WORKLOADS_FOLDER = Path(__file__).parent / "workloads"
RESULTS_FOLDER = Path(__file__).parent / "results"
START_FOLDER = "start"  # its subfolder for files that have only times to compile and record
