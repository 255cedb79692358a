"""The benchmark: workloads, each measured in a process of its own, and their result files.

``__main__`` measures workloads in four ways; the other scripts measure one thing each. README.md describes the scripts,
and results/README.md the results.
"""

from pathlib import Path

RESULTS_FOLDER = Path(__file__).parent / "results"
START_FOLDER = "start"  # its subfolder for files that have only times to compile and record
