"""A process without the native parts: outputs are torch's, replays are made in Python, and the report says both.

``tools/gpu_suite --without-native`` runs these tests; with the native parts they are skipped.
"""

from __future__ import annotations

import unittest

import torch
from indirection import IndirectionTestCase, Program, compiled
from indirection import tensor as given
from torch.testing._internal.common_utils import run_tests

import pygraph_trees
from pygraph_trees.native import binding

NATIVE = "no (replays are slower, outputs are not kept), because "
NOT_KEPT = "outputs that outlive their step are overwritten, because the native parts are missing"


@unittest.skipIf(binding.extension is not None, "this process has the native parts")
class TestWithoutNative(IndirectionTestCase):
    outputs = "keep"

    def test_an_output_of_an_earlier_step_is_overwritten_or_raises(self) -> None:
        graphed = compiled(lambda x: x * 2 + 1).graphed
        ones = torch.ones(64, device=self.device)
        with torch.no_grad():
            warmed_up, recorded, replayed = (graphed(ones * n) for n in (1, 2, 3))
        with self.assertRaisesRegex(RuntimeError, "overwritten by a subsequent run"):
            warmed_up.sum()
        self.assertEqual(recorded.shape, (64,))
        self.assertEqual(replayed, ones * 7)
        report = pygraph_trees.report()
        (function,) = report.functions
        self.assertEqual(function.why_not_kept, "the native parts are missing")
        self.assertEqual((function.moved_outputs, function.replays), ((), 1))
        self.assertIn(NOT_KEPT, " ".join(str(report).split()))
        self.assertTrue(report.environment.native.startswith(NATIVE), report.environment.native)

    def test_inputs_are_given_by_address(self) -> None:
        """The bits are those of un-graphed calls while inputs move, and no byte is copied."""
        for program in (
            Program("inference", lambda x, y: (x.sin() @ y.mT, y.cos()), (given(64, 33), given(64, 33))),
            Program("training", lambda x: x.sin() * x, (given(64, 33),), backward=True),
        ):
            with self.subTest(program.name):
                self.assertIn("patch", self.check(program).routes)


if __name__ == "__main__":
    run_tests()
