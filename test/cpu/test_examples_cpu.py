"""tools/examples on the CPU: programs give the same values in each run, and differences are found."""

from __future__ import annotations

import json
import math
import sys
import tempfile
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tools" / "examples"), str(Path(__file__).resolve().parent)]

import captured
import torch
import works_with
from torch.testing._internal.common_utils import TestCase, run_tests


class TestWorksWith(TestCase):
    def test_a_program_without_a_gpu(self):
        """Its values are the same in each run, so they can be compared."""
        first, second = (works_with.run("scaler", "cpu") for _ in range(2))
        self.assertEqual((len(first["values"]), first["replays"]), (works_with.STEPS, 0))
        self.assertTrue(works_with.agree(first["values"], second["values"]))

        for ours, upstreams in (([1, 2], [1, 3]), ([1.0], [1.01]), ([], []), ([1.0], [1.0, 1.0]), ([math.nan], [1.0])):
            self.assertFalse(works_with.agree(ours, upstreams), (ours, upstreams))

    def test_against_upstream(self):
        with tempfile.TemporaryDirectory() as folder, mock.patch.dict("os.environ", TORCH_COMPILE_DISABLE="1"):
            out = Path(folder) / "found.json"
            options = ("scaler", "--device", "cpu", "--against-upstream", "--json", str(out))
            status, printed, said = captured.run(works_with.main, *options)
            self.assertEqual(status, 0, said)
            found = json.loads(out.read_text())
        self.assertEqual((found["same"], found["ours"]), ({"scaler": True}, found["upstream"]))
        self.assertIn("scaler     the same; 0 replays", printed)

    def test_bad_options(self):
        for options, says in (
            ([], "there is no GPU that torch can use; with --device cpu"),
            (["trane"], "there is no program trane; there are generate, trainer"),
            (["--upstream", "--against-upstream"], "not allowed with argument"),
        ):
            with mock.patch.object(torch.cuda, "is_available", lambda: False):
                status, _, said = captured.run(works_with.main, *options)
            self.assertEqual(status, 2)
            self.assertIn(says, said)


if __name__ == "__main__":
    run_tests()
