"""Runs random programs: ``python tools/fuzzing``, in the current Python environment.

``tools/fuzz`` prepares an environment and runs this. Arguments and exit status are those of ``command_line``. On
termination, processes that this one started end too.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

if __name__ == "__main__":
    # The checkout itself, installed or not, and ``fuzzing`` as a package for relative imports.
    sys.path[:0] = [str(ROOT), str(ROOT / "tools")]
    from processes import end_on_termination

    from fuzzing.command_line import main

    end_on_termination()
    sys.exit(main(sys.argv[1:]))
