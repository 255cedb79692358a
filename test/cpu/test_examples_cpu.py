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
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)

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


class TestModel(Examples):
    def model(self):
        torch.manual_seed(0)
        return GPT(SMALL).requires_grad_(False)

    def test_cache_gives_what_the_whole_row_gives(self):
        model, rows = self.model(), torch.randint(256, (3, SMALL.context))
        whole = model(rows)
        self.assertEqual(whole.shape, (3, SMALL.context, 256))
        for first in (1, 7):  # this many at once, then one by one
            cache, found = model.empty_cache(3), []
            for begin, stop in [(0, first), *((n, n + 1) for n in range(first, SMALL.context))]:
                found.append(model(rows[:, begin:stop], torch.arange(begin, stop), cache))
            self.assertEqual(torch.cat(found, 1), whole, atol=1e-5, rtol=1e-5)
        for cached in (*cache[0], *cache[1]):
            self.assertTrue((cached != 0).all())


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

    def test_differences_are_told(self):
        counts = {"recordings": 0, "skips": 0, "replays": 3, "copied_bytes": 0, "extra_copies": 0}
        for last, status in ((1.005, 0), (1.02, 1), (float("nan"), 1)):
            found = {
                side: {"losses": [2.0, loss], "steps_per_s": speed, **counts}
                for side, loss, speed in (("upstream", 1.0, 4.0), ("ours", last, 6.0))
            }
            with mock.patch.object(train, "run_both_ways", lambda script, arguments, found=found: found):
                result, printed, _ = run(train, "--device", "cpu", "--against-upstream")
            self.assertEqual(result, status)
            self.assertIn("losses DIFFER" if status else "losses agree", printed)
            self.assertIn("ours is 1.50 times as fast", printed)


class TestOptions(Examples):
    def test_bad_options(self):
        no_gpu = mock.patch.object(torch.cuda, "is_available", lambda: False)
        missing = str(self.folder / "none" / "file")
        on_cpu = ("--device", "cpu")
        for example, options, says in (
            (train, [], "there is no GPU that torch can use; with --device cpu"),
            (train, ["--steps=0"], "expected a whole number of at least 1; got '0'"),
            (generate, ["--tokens=1"], "expected a whole number of at least 2; got '1'"),
            (train, ["--json", missing], "expected a file in a folder that exists"),
            (generate, [*on_cpu, "--weights", missing], "does not hold what train.py --out"),
            (generate, [*on_cpu, "--prompt", ""], "a prompt needs at least one byte"),
            (generate, [*on_cpu, "--prompt", "a" * 60], "take 92 bytes together, and the model's context is 64"),
            (train, ["--upstream", "--against-upstream"], "not allowed with argument"),
        ):
            with no_gpu:
                self.assertRefused(example, *options, says=says)


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
