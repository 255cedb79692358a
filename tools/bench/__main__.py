"""``python tools/bench [NAMES...]``: measures workloads in four ways and writes JSON and Markdown.

Results go to ``tools/bench/results/<gpu>-torch<version>.json``, with a table next to it. The page of all results
in that folder, and the table in the project's README, are regenerated. Exit status 0 if all workloads were measured, 1
if one failed, 2 if there is no GPU or the command line is wrong.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

if __name__ == "__main__":
    # The checkout itself, installed or not, and ``bench`` as a package for relative imports.
    sys.path[:0] = [str(ROOT), str(ROOT / "tools")]
    from processes import end_on_termination

    from bench.command_line import main

    end_on_termination()
    sys.exit(main(sys.argv[1:]))
