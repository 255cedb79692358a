"""``TORCH_LOGS="+pygraph"`` works when the package is imported first, and by the package's name in any order."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

from torch.testing._internal.common_utils import TestCase, run_tests

SAY = "import logging; log = logging.getLogger('pygraph_trees.report'); log.info('an info'); log.debug('a debug')"


def run_python(code, logs):
    env = {**os.environ, "PYTHONPATH": str(ROOT), "TORCH_LOGS": logs}
    return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120)


class TestTorchLogs(TestCase):
    def check(self, code, logs, *, info, debug):
        done = run_python(f"{code}\n{SAY}", logs)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(("an info" in done.stderr, "a debug" in done.stderr), (info, debug), done.stderr)
        return done.stdout.strip()

    def test_the_short_name_works_if_the_package_is_imported_first(self):
        """It also works next to other names; the variable stays unchanged."""
        self.check("import pygraph_trees, torch", "+pygraph", info=True, debug=True)
        self.check("import pygraph_trees, torch", "pygraph", info=True, debug=False)
        show = "import pygraph_trees, torch, os; print(os.environ['TORCH_LOGS'])"
        shown = self.check(show, "+pygraph, graph_breaks", info=True, debug=True)
        self.assertEqual(shown, "+pygraph, graph_breaks")

    def test_the_package_name_works_if_torch_is_imported_first(self):
        self.check("import torch, pygraph_trees", "+pygraph_trees", info=True, debug=True)

    def test_logs_are_off_by_default(self):
        self.check("import pygraph_trees, torch", "recompiles", info=False, debug=False)

    def test_entry_point_installs_nothing(self):
        code = (
            "import sys, torch\nfrom inductor_patches import register\n"
            "register(); register(); print('pygraph_trees' in sys.modules)"
        )
        done = run_python(code, "recompiles")
        self.assertEqual(done.stdout.strip(), "False", done.stderr)


if __name__ == "__main__":
    run_tests()
