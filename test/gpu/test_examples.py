"""tools/examples on a GPU: results are equal to those of upstream's graphs."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "tools" / "examples"
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

import torch
from packages import is_torchvision_broken
from processes import end
from torch.testing._internal.common_utils import TestCase, run_tests

TIMEOUT_S = 400  # for all programs in both ways


@unittest.skipUnless(torch.cuda.is_available(), "needs a CUDA device")
class TestExamples(TestCase):
    def run_example(self, *options):
        """Runs works_with.py in another process, which must succeed; returns what it wrote and printed."""
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "figures.json"
            process = subprocess.Popen(
                [sys.executable, str(EXAMPLES / "works_with.py"), "--json", str(out), *options],
                cwd=ROOT,
                # Otherwise a program's last steps may be part of a measurement.
                env={**os.environ, "PYGRAPH_SELECTIVE": "always"},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
            try:
                printed, _ = process.communicate(timeout=TIMEOUT_S)
            finally:
                end(process)
            self.assertEqual(process.returncode, 0, printed)
            return json.loads(out.read_text()), printed

    def test_programs_of_other_libraries(self):
        """Each program gives the same results as with torch's own graphs, and runs in our graphs."""
        needed = {"generate": "transformers", "trainer": "accelerate", "lightning": "lightning"}
        names = ["generate", "trainer", "lightning", "diffusion", "scaler"]
        if is_torchvision_broken():  # these libraries import it
            names = [n for n in names if n not in needed]
        names = [n for n in names if n not in needed or importlib.util.find_spec(needed[n]) is not None]
        found, printed = self.run_example(*names, "--against-upstream")
        self.assertEqual(found["same"], dict.fromkeys(names, True), printed)
        for name in names:
            self.assertGreater(found["ours"][name]["replays"], 5, f"{name}: {printed}")


if __name__ == "__main__":
    run_tests()
