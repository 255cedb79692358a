"""Random programs whose inputs move, alias and are written to, against eager.

``PYGRAPH_FUZZ_PROGRAMS`` says how many, 300 without it; ``tools/fuzz`` goes on for as long as it is told. They run in
processes of their own: eager itself has kernels that fault on misaligned inputs, and a fault ends a process.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from unittest import mock

from indirection import IndirectionTestCase
from torch.testing._internal.common_utils import run_tests

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))

from fuzzing.campaign import Plan, run
from fuzzing.case import Case, Input
from fuzzing.check import check

PROGRAMS = int(os.environ.get("PYGRAPH_FUZZ_PROGRAMS", "300"))
SECONDS = 400.0


class TestIndirectionRandom(IndirectionTestCase):
    programs = PROGRAMS
    seed = 7

    def test_random_programs(self):
        drawn = self.programs + self.programs // 10  # some cannot be run by eager, or differ under upstream as well
        plan = Plan("cuda", "ours", "upstream", None, SECONDS, seed=self.seed, most_cases=drawn, jobs=6)
        with mock.patch.dict(os.environ, PYGRAPH_INDIRECTION=self.indirection):
            outcome = run(plan, lambda done, total, text: None)
        if outcome.failure is not None:
            self.fail(f"{outcome.failure.message}\n\n{outcome.failure.case.text()}")
        counts = outcome.counts
        self.assertEqual(counts.cases, drawn, str(counts))
        self.assertGreaterEqual(counts.cases - counts.invalid, 0.8 * drawn, str(counts))
        self.assertLess(counts.torch_differs, 0.1 * drawn, str(counts))
        self.assertGreaterEqual(counts.cases - counts.invalid - counts.torch_differs, self.programs, str(counts))
        # What is compared is replays, not calls that ran un-graphed.
        self.assertGreater(counts.replays, counts.cases, str(counts))
        self.assertLess(counts.ungraphed_calls, 0.1 * counts.calls, str(counts))

    def test_programs_that_were_hard(self):
        for case in (
            Case((Input("a", (4,), place="kept"), Input("b", (4,))), ("a.mul_(0.5).add_(b)",), ("a",), 6),
            Case(
                (Input("a", (8, 8), place="reused"), Input("w", (8, 8), place="same", parameter=True)),
                ("v0 = torch.tanh(a @ w)", "v1 = a[1:] * 2"),  # a is the last v0, and gone afterwards
                ("v0", "v1"),
                6,
                feedback=((0, "a"),),
            ),
            Case(
                (Input("a", (9,), place="reused"), Input("b", (5,), shares="a", shift=3, layout="misaligned")),
                ("b.add_(1)", "v0 = a * 2"),
                ("v0", "b"),
                6,
            ),
        ):
            with self.subTest(case.text()):
                check(case, self.device, under_test="ours", control="compile", exactly="compile")


if __name__ == "__main__":
    run_tests()
