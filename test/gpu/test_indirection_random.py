"""Random programs whose inputs move, alias and are written to, against eager.

``PYGRAPH_FUZZ_PROGRAMS`` says how many, 60 without it; ``tools/fuzz`` goes on for as long as it is told.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from hypothesis import HealthCheck, assume, given, settings
from indirection import Facts, IndirectionTestCase
from torch.testing._internal.common_utils import run_tests

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))

from fuzzing.case import Case, Input
from fuzzing.check import InvalidCase, Mismatch, check
from fuzzing.strategies import cases

PROGRAMS = int(os.environ.get("PYGRAPH_FUZZ_PROGRAMS", "60"))
SETTINGS = settings(
    max_examples=PROGRAMS,
    deadline=None,
    derandomize=True,
    database=None,
    print_blob=False,
    suppress_health_check=list(HealthCheck),
)


class TestIndirectionRandom(IndirectionTestCase):
    def test_random_programs(self):
        counted = {"programs": 0, "torch differs": 0}

        @SETTINGS
        @given(cases())
        def agrees(case: Case) -> None:
            try:
                verdict = check(case, self.device, under_test="ours", control="compile")
            except InvalidCase:
                assume(False)
            except Mismatch as error:
                raise AssertionError(f"{error}\n\n{case.text()}") from None
            counted["programs"] += 1
            counted["torch differs"] += verdict.torch_differs is not None

        agrees()
        facts = Facts.now()
        self.assertGreaterEqual(counted["programs"], 0.8 * PROGRAMS)
        self.assertLess(counted["torch differs"], 0.2 * PROGRAMS)
        # What is compared is replays of patched inputs, not calls that ran un-graphed.
        self.assertGreater(facts.replays, counted["programs"])
        self.assertGreater(facts.routes.count("patch"), counted["programs"])

    def test_programs_that_were_hard(self):
        for case in (
            Case((Input("a", (4,), place="kept"), Input("b", (4,))), ("a.mul_(0.5).add_(b)",), ("a",), 6),
            Case(
                (Input("a", (8, 8), place="reused"), Input("w", (8, 8), place="same", parameter=True)),
                ("v0 = torch.tanh(a @ w)", "v1 = a[1:]"),
                ("v0", "v1", "a"),
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
