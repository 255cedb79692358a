"""tools/examples on a GPU: results are equal to those of upstream's graphs, and no input is copied.

Each example runs in another process, and writes its results and the report's counts of replays and recordings.
"""

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
sys.path[:0] = [str(ROOT), str(ROOT / "tools"), str(EXAMPLES)]

import torch
from packages import is_torchvision_broken
from processes import end
from text import GPT, SIZES, save
from torch.testing._internal.common_utils import TestCase, run_tests

from pygraph_trees.trees.recordings.kept_outputs import why_not_moved

TIMEOUT_S = 400  # for an example with its children; each takes less than half a minute on an idle machine


@unittest.skipUnless(torch.cuda.is_available(), "needs a CUDA device")
class TestExamples(TestCase):
    def setUp(self):
        super().setUp()
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)

    def run_example(self, name, *options):
        """Runs an example, which must succeed; returns the results that it wrote and its output."""
        out = self.folder / "figures.json"
        command = [sys.executable, str(EXAMPLES / name), "--json", str(out), *options]
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            # Otherwise the observed step may be part of a measurement.
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

    def assertReplayed(self, ours, replays, recordings):
        """A step had exactly ``replays`` replays without a copy, and there are at most ``recordings`` recordings."""
        self.assertEqual(ours["replays"], replays, ours)
        self.assertEqual((ours["copied_bytes"], ours["extra_copies"], ours["skips"]), (0, 0, 0))
        self.assertLessEqual(ours["recordings"], recordings)

    @unittest.skipIf(why_not_moved() is not None, f"gradients do not outlive their step: {why_not_moved()}")
    def test_training(self):
        found, printed = self.run_example(
            "train.py", "--against-upstream", "--size", "tiny", "--steps", "24", "--tolerance", "0.001"
        )
        upstream, ours = found["upstream"], found["ours"]
        self.assertTrue(found["same"], printed)
        self.assertEqual(len(ours["losses"]), 24)
        self.assertEqual(ours["losses"], upstream["losses"], atol=1e-3, rtol=0)
        self.assertLess(ours["losses"][-1], ours["losses"][0] - 0.5)
        self.assertReplayed(ours, replays=3, recordings=6)  # forward, backward, optimizer
        self.assertGreater(upstream["copied_bytes"], 0)
        self.assertIn("losses agree", printed)

    def test_generation(self):
        torch.manual_seed(0)
        weights = self.folder / "weights.pt"
        save(GPT(SIZES["tiny"]), weights)
        prompts = ("one", "and two", "3")
        options = [option for prompt in prompts for option in ("--prompt", prompt)]
        found, printed = self.run_example(
            "generate.py", "--against-upstream", "--weights", str(weights), "--tokens", "40", *options
        )
        upstream, ours = found["upstream"], found["ours"]
        self.assertTrue(found["same"], printed)
        self.assertEqual(ours["texts"], upstream["texts"])
        for prompt, text in zip(prompts, ours["texts"], strict=True):
            self.assertTrue(text.startswith(prompt), text)
        self.assertReplayed(ours, replays=1, recordings=2)  # one recording serves the caches of all conversations
        self.assertEqual(upstream["replays"], 0)  # the step writes to its inputs
        self.assertGreater(upstream["skips"], 0)
        self.assertIn("3 texts, all the same", printed)

    def test_programs_of_other_libraries(self):
        """Each program gives the same results as with torch's own graphs, and runs in our graphs."""
        needed = {"generate": "transformers", "trainer": "accelerate", "lightning": "lightning"}
        names = ["generate", "trainer", "lightning", "diffusion", "scaler"]
        if is_torchvision_broken():  # these libraries import it
            names = [n for n in names if n not in needed]
        names = [n for n in names if n not in needed or importlib.util.find_spec(needed[n]) is not None]
        found, printed = self.run_example("works_with.py", *names, "--against-upstream")
        self.assertEqual(found["same"], dict.fromkeys(names, True), printed)
        for name in names:
            self.assertGreater(found["ours"][name]["replays"], 5, f"{name}: {printed}")

    @unittest.skipIf(why_not_moved() is not None, f"gradients do not outlive their step: {why_not_moved()}")
    def test_training_then_generation(self):
        found, printed = self.run_example("generate.py", "--size", "tiny", "--steps", "8", "--tokens", "12")
        self.assertEqual(len(found["texts"]), 4)
        self.assertReplayed(found, replays=1, recordings=8)
        self.assertIn("patches on: ", printed)


if __name__ == "__main__":
    run_tests()
