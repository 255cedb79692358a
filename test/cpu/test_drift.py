"""Drift: which sampled calls differ from those right after a decision."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from hypothesis import given
from hypothesis import strategies as st
from torch.testing._internal.common_utils import TestCase, run_tests

from pygraph_trees.selection.drift import Drift, DriftRules, Sample

RULES = DriftRules()
TIMES = st.floats(0.1, 1e6)


class TestDrift(TestCase):
    def samples(self, drift: Drift, count: int, host_us: float = 20.0, gpu_us: float = 50.0, idle: float = 1.0) -> int:
        """Adds samples, the share ``idle`` of them with the GPU idle, until calls drift; returns how many it added."""
        for number in range(count):
            if drift.add(Sample(host_us, gpu_us, (number % 10) < 10 * idle)):
                return number + 1
        return count

    def test_calls_as_before_are_no_drift(self) -> None:
        drift = Drift()
        self.assertEqual(self.samples(drift, 1000), 1000)
        self.assertEqual(self.samples(drift, 1000, host_us=29.0, gpu_us=70.0, idle=0.6), 1000)
        self.assertEqual(self.samples(drift, 1000, host_us=20.0 + RULES.floor_us - 1), 1000)

    def test_other_times_or_a_busy_gpu_are_a_drift(self) -> None:
        for other in ({"host_us": 31.0}, {"host_us": 10.0}, {"gpu_us": 80.0}, {"gpu_us": 30.0}, {"idle": 0.0}):
            with self.subTest(**other):
                drift = Drift()
                self.samples(drift, RULES.samples)
                self.assertEqual(self.samples(drift, 100, **other), RULES.windows * RULES.samples)

    def test_small_times_may_vary(self) -> None:
        drift = Drift()
        self.samples(drift, RULES.samples, host_us=2.0, gpu_us=1.0)
        self.assertEqual(self.samples(drift, 100, host_us=6.0, gpu_us=5.0), 100)

    def test_one_window_is_not_enough(self) -> None:
        drift = Drift()
        self.samples(drift, RULES.samples)
        for _ in range(20):
            self.assertEqual(self.samples(drift, RULES.samples, gpu_us=500.0), RULES.samples)
            self.assertEqual(self.samples(drift, RULES.samples), RULES.samples)

    def test_single_calls_are_no_matter(self) -> None:
        drift = Drift()
        for number in range(500):
            self.assertFalse(drift.add(Sample(20.0 if number % 5 else 2e4, 50.0 if number % 5 != 2 else 1e5, True)))

    @given(st.lists(st.tuples(TIMES, TIMES, st.booleans()), max_size=60))
    def test_a_drift_takes_enough_samples(self, drawn: list[tuple[float, float, bool]]) -> None:
        drift = Drift()
        for number, (host_us, gpu_us, is_idle) in enumerate(drawn, start=1):
            if drift.add(Sample(host_us, gpu_us, is_idle)):
                self.assertGreaterEqual(number, (1 + RULES.windows) * RULES.samples)
                return


if __name__ == "__main__":
    run_tests()
