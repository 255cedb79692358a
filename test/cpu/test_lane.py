"""tools/lane.py: a failing test and a process that dies are failures, and the other files run."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

from torch.testing._internal.common_utils import TestCase, run_tests

# The tool without its imports of torch, which these files do not need.
TOOL = "import sys; sys.path.insert(0, sys.argv.pop(1)); import lane; lane.PRELOADED = (); sys.exit(lane.main())"
FILES = {  # text, status, and what is printed
    "passes": ("import pytest\ndef test_a(): pass\n@pytest.mark.skip\ndef test_b(): pass\n", 0, "1 passed, 1 skipped"),
    "fails": ("def test_a(): pass\ndef test_b(): assert 1 == 2, 'told'\n", 1, "1 passed, 1 failed"),
    "dies": ("import os\ndef test_a(): pass\ndef test_b(): os._exit(9)\n", 1, "1 died"),
    "broken": ("import nowhere_at_all\n", 1, "1 error, 1 died"),
}


class TestLane(TestCase):
    def run_tool(self, **files):
        with tempfile.TemporaryDirectory() as folder:
            paths = [Path(folder, f"test_{name}.py") for name in files]
            for path, text in zip(paths, files.values(), strict=True):
                path.write_text(text)
            command = [sys.executable, "-c", TOOL, ROOT / "tools", "--jobs", "2", *paths]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=100)
        return done.returncode, done.stdout

    def test_failing_tests_and_processes_that_die_are_failures(self):
        for name, (text, status, _) in FILES.items():
            self.assertEqual(self.run_tool(**{name: text})[0], status, name)
        status, printed = self.run_tool(**{name: text for name, (text, _, _) in FILES.items()})
        self.assertEqual(status, 1)
        for name, (_, _, counts) in FILES.items():
            self.assertRegex(printed, rf"(?m)^(.*/)?test_{name}\.py: {counts} in ")


if __name__ == "__main__":
    run_tests()
