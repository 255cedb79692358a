"""tools/examples on the CPU: they run, their model's cache is right, and errors of bad options say what fits."""

from __future__ import annotations

import json
import math
import os
import sys
import tempfile
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "tools" / "examples"
sys.path[:0] = [str(ROOT), str(EXAMPLES), str(Path(__file__).resolve().parent)]

import captured
import generate
import torch
import train
from text import GPT, Size, save
from torch.testing._internal.common_utils import TestCase, run_tests

CPU = torch.device("cpu")
SMALL = Size(layers=2, width=16, heads=2, context=24, batch=2)


def run(example, *argv):
    """Returns the exit status and the printed text; nothing is compiled."""
    with mock.patch.object(torch, "compile", lambda fn, **options: fn):
        return captured.run(example.main, *argv)


class Examples(TestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.addClassCleanup(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())
        torch.set_float32_matmul_precision("high")  # as examples do: a test may not change it

    def setUp(self):
        super().setUp()
        self.folder = Path(self.enterContext(tempfile.TemporaryDirectory()))

    def run_example(self, example, *options):
        """Returns what an example wrote and printed."""
        out = self.folder / "figures.json"
        status, printed, said = run(example, "--device", "cpu", "--json", str(out), *options)
        self.assertEqual(status, 0, said)
        return json.loads(out.read_text()), printed

    def assertRefused(self, example, *options, says):
        status, _, said = run(example, *options)
        self.assertEqual(status, 2)
        self.assertIn(says, said)


class TestRuns(Examples):
    def test_train_and_generate(self):
        weights = self.folder / "weights.pt"
        found, printed = self.run_example(train, "--steps", "12", "--out", str(weights))
        self.assertEqual(len(found["losses"]), 12)
        self.assertLess(found["losses"][-1], found["losses"][0])
        self.assertGreater(found["steps_per_s"], 0)
        self.assertEqual((found["recordings"], found["replays"], found["copied_bytes"]), (0, 0, 0))
        self.assertIn("step 11: loss ", printed)

        options = ("--weights", str(weights), "--tokens", "8", "--prompt", "one", "--prompt", "another")
        found, printed = self.run_example(generate, *options)
        self.assertEqual([text[:3] for text in found["texts"]], ["one", "ano"])
        self.assertIn(f"> {found['texts'][1]}\n", printed)
        self.assertEqual(self.run_example(generate, *options)[0]["texts"], found["texts"])

    def test_against_upstream(self):
        weights, out = self.folder / "weights.pt", self.folder / "figures.json"
        torch.manual_seed(0)
        save(GPT(SMALL), weights)
        options = ["--tokens", "4", "--prompt", "- a prompt", "--against-upstream", "--json", str(out)]
        with mock.patch.dict(os.environ, {"TORCH_COMPILE_DISABLE": "1"}):
            status, printed, said = run(generate, "--device", "cpu", "--weights", str(weights), *options)
        self.assertEqual(status, 0, said)
        found = json.loads(out.read_text())
        self.assertEqual(found["ours"]["texts"], found["upstream"]["texts"])
        self.assertIn("1 texts, all the same", printed)


class TestWorksWith(TestCase):
    def test_a_program_without_a_gpu(self):
        """Its values are the same in each run, so they can be compared."""
        import works_with

        first, second = (works_with.run("scaler", "cpu") for _ in range(2))
        self.assertEqual((len(first["values"]), first["replays"]), (works_with.STEPS, 0))
        self.assertTrue(works_with.agree(first["values"], second["values"]))

        for ours, upstreams in (([1, 2], [1, 3]), ([1.0], [1.01]), ([], []), ([1.0], [1.0, 1.0]), ([math.nan], [1.0])):
            self.assertFalse(works_with.agree(ours, upstreams), (ours, upstreams))


if __name__ == "__main__":
    run_tests()
