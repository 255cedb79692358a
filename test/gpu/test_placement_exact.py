"""Programs that mix CPU and GPU, with floating-point numbers left to the CPU."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from placement import PlacementTestCase, name_of
from placement_programs import PROGRAMS
from torch.testing._internal.common_utils import instantiate_parametrized_tests, parametrize, run_tests

# One of each family, and all whose partitions are others than with floating-point numbers moved.
SOME = [p for n, p in enumerate(PROGRAMS) if p.exact or p.family not in [q.family for q in PROGRAMS[:n]]]


class TestExactPlacement(PlacementTestCase):
    @parametrize("program", SOME, name_fn=name_of)
    def test_family(self, program):
        self.check_family(program, "exact")


instantiate_parametrized_tests(TestExactPlacement)

if __name__ == "__main__":
    run_tests()
