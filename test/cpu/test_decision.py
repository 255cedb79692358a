"""Rules that decide whether functions are graphed: plain facts, the model of a step, gains, and the ways to measure."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from hypothesis import given
from hypothesis import strategies as st
from torch.testing._internal.common_utils import TestCase, run_tests

from pygraph_trees.selection.decision import (
    Call,
    Comparison,
    Costs,
    Execution,
    Facts,
    Gain,
    Handed,
    Load,
    Objective,
    Part,
    Rules,
    TooFewPairs,
    compare,
    decide,
    next_way,
    plain_text,
    plain_way,
    step_us,
)

LATENCY, THROUGHPUT = Objective.LATENCY, Objective.THROUGHPUT
GRAPHED, UNGRAPHED = Execution.GRAPHED, Execution.UNGRAPHED
RULES = Rules()

times = st.floats(0, 1e5)
grown = st.floats(0, 1e4)
loads = st.builds(Load, times, times, st.integers(1, 40))
facts = st.builds(Facts, st.integers(0, 400), st.integers(0, 40), st.integers(0, 40), st.integers(0, 10**9))
objectives = st.sampled_from(Objective)


def part(ungraphed, graphed, launches=1, pairs=8, **more):
    """A function whose calls all take the same times, ``(host, gpu)`` in us."""
    return Part([Call(*ungraphed)] * pairs, [Call(*graphed)] * pairs, launches, **more)


def gain(ungraphed_us, graphed_us, noise_us=0.0):
    margin_us = max(1.0, 0.02 * ungraphed_us)
    return Gain(ungraphed_us, graphed_us, graphed_us - ungraphed_us, margin_us, noise_us)


def compared(latency, throughput=None, copied_bytes=0, kernels=2):
    return Comparison(latency, latency if throughput is None else throughput, 10, kernels, copied_bytes)


def grow(record, **by):
    return dataclasses.replace(record, **{name: getattr(record, name) + more for name, more in by.items()})


class TestPlain(TestCase):
    def test_many_launches_without_copies_are_graphed(self):
        self.assertIs(plain_way([Facts(30)]), GRAPHED)
        self.assertIs(plain_way([Facts(274, by_address=3)]), GRAPHED)

    def test_what_a_replay_does_before_its_launch_is_measured(self):
        """Un-graphed code launches while the GPU computes, so a graph wins nothing there."""
        for facts in (
            Facts(100, copied=1, copied_bytes=200_000_000),
            Facts(30, copied=1, copied_bytes=1000),
            Facts(60, by_address=100),
            Facts(30, by_address=20),
        ):
            self.assertIsNone(plain_way([facts]))
        self.assertIs(plain_way([Facts(60, by_address=6)]), GRAPHED)

    def test_large_copies_for_few_launches_are_not(self):
        self.assertIs(plain_way([Facts(1, copied=3, copied_bytes=25_000_000)]), UNGRAPHED)

    def test_few_launches_by_address_are_measured(self):
        self.assertIsNone(plain_way([Facts(1, by_address=3)]))  # the equation of state
        self.assertIsNone(plain_way([Facts(7, by_address=21)]))  # turbulent kinetic energy

    def test_without_a_fast_path_more_launches_are_needed(self):
        self.assertIs(plain_way([Facts(20)]), GRAPHED)
        self.assertIsNone(plain_way([Facts(20, has_fast_path=False)]))

    def test_functions_are_decided_together(self):
        self.assertIs(plain_way([Facts(2), Facts(200)]), GRAPHED)

    @given(st.lists(facts, min_size=1, max_size=3), st.integers(0, 100), st.integers(0, 20), st.integers(0, 10**8))
    def test_work_for_a_replay_never_makes_it_plainly_better(self, parts, launches, count, nbytes):
        first, *others = parts
        more = grow(first, by_address=count, copied=count, copied_bytes=nbytes if count else 0)
        if plain_way(parts) is not GRAPHED:
            self.assertIsNot(plain_way([more, *others]), GRAPHED)
        if plain_way(parts) is not UNGRAPHED:
            self.assertIsNot(plain_way([grow(first, launches=launches), *others]), UNGRAPHED)

    def test_a_plain_decision_as_text(self):
        copies = Facts(1, copied=1, copied_bytes=25_000_000)
        lines = [plain_text(GRAPHED, [Facts(12)]), plain_text(GRAPHED, [Facts(12), Facts(30)])]
        self.assertExpectedInline(
            "\n".join([*lines, plain_text(UNGRAPHED, [copies])]),
            """\
graphed: 12 launches in one replay, without a measurement
graphed: 42 launches in 2 replays, without a measurement
un-graphed: 1 launch in one replay, 25 MB copied, without a measurement""",
        )


class TestStep(TestCase):
    @given(st.lists(loads, max_size=5))
    def test_latency_is_what_a_simulation_of_each_piece_gives(self, work):
        host = gpu = 0.0
        for load in work:
            for _ in range(load.launches):
                host += load.host_us / load.launches
                gpu = max(gpu, host) + load.gpu_us / load.launches
        self.assertEqual(step_us(work, LATENCY), max(host, gpu), rtol=1e-9, atol=1e-6)

    @given(st.lists(loads, max_size=5))
    def test_throughput_is_at_best_and_latency_at_worst(self, work):
        alone = sum(step_us([load], LATENCY) for load in work)
        tolerance = 1e-6
        self.assertLessEqual(step_us(work, THROUGHPUT), step_us(work, LATENCY) + tolerance)
        self.assertLessEqual(step_us(work, LATENCY), alone + tolerance)

    @given(st.lists(loads, min_size=1, max_size=5), st.data(), grown, grown, objectives)
    def test_more_work_takes_no_less(self, work, data, host_us, gpu_us, objective):
        at = data.draw(st.integers(0, len(work) - 1))
        more = [*work[:at], grow(work[at], host_us=host_us, gpu_us=gpu_us), *work[at + 1 :]]
        self.assertGreaterEqual(step_us(more, objective), step_us(work, objective) - 1e-6)

    def test_the_model_gives_measured_replays(self):
        # (host, time in the graph, latency, a call without waiting) in us, from tools/bench/results/h200
        for name, host_us, gpu_us, latency_us, throughput_us in (
            ("EOS", 38.8, 43, 80, 43),
            ("TKE", 64.4, 238, 299, 238),
            ("DLRM", 81.6, 345, 438, 366),
            ("DR-I", 87.8, 10493, 10404, 10625),
            ("ALNET", 69.9, 239, 313, 251),
        ):
            replay = [Load(host_us, gpu_us)]
            self.assertEqual(step_us(replay, LATENCY), latency_us, rtol=0.03, atol=0, msg=name)
            self.assertEqual(step_us(replay, THROUGHPUT), throughput_us, rtol=0.06, atol=0, msg=name)

    def test_waits_of_the_gpu_are_no_work(self):
        # The GPU is idle: it passes the first event at once; the only kernel is launched after 44 us and takes 10.
        found = compare([part((44, 54), (8, 10))])
        self.assertEqual((found.latency.ungraphed_us, found.latency.graphed_us), (54, 18))

    def test_outputs_handed_on_cost_patches_and_copies(self):
        self.assertEqual(Costs().of_handed(Handed()), Load(0, 0))
        self.assertEqual(Costs().of_handed(Handed(patched=10)), Load(9, 0))
        copied = Costs().of_handed(Handed(copied=16, copied_bytes=64 << 20))
        self.assertEqual((copied.host_us, copied.gpu_us), (7.82, 38.0), atol=0.1, rtol=0)


class TestKinds(TestCase):
    """Programs bound by the host, by the GPU, and by both."""

    def way(self, *parts):
        return decide(compare(parts)).way

    def test_programs_bound_by_the_host(self):
        self.assertIs(self.way(part((500, 100), (15, 100), 50)), GRAPHED)
        # upstream's replay with its checks and copies, of one kernel
        self.assertIs(self.way(part((30, 5), (70, 12))), UNGRAPHED)

    def test_programs_bound_by_the_gpu(self):
        # launches run ahead; the replay adds copies to what the GPU does
        self.assertIs(self.way(part((400, 1450), (100, 1800), 100)), UNGRAPHED)
        # the same without copies: nothing to gain, nothing to lose
        self.assertIs(self.way(part((400, 1450), (5, 1450), 100)), GRAPHED)

    def test_a_way_that_gains_latency_and_loses_throughput_is_not_taken(self):
        """Un-graphed code is taken only if it is worse in neither."""
        found = compare([part((60, 40), (50, 40), 9)])  # un-graphed launches overlap with the GPU
        self.assertGreater(found.latency.gain_us, found.latency.needed_us)
        self.assertTrue(found.throughput.is_worse(UNGRAPHED))
        self.assertIs(decide(found).way, GRAPHED)

    def test_forward_and_backward_go_together(self):
        loses, gains = part((20, 10), (30, 35)), part((400, 100), (20, 110), 40)
        self.assertIs(self.way(loses), UNGRAPHED)
        self.assertIs(self.way(gains), GRAPHED)
        self.assertIs(self.way(loses, gains), GRAPHED)

    def test_measured_programs_with_copies_are_ungraphed(self):
        for ungraphed_us, upstream_us in ((54, 91), (322, 463), (1450, 1800)):
            self.assertIs(self.way(part((ungraphed_us / 2,) * 2, (upstream_us / 2,) * 2)), UNGRAPHED)

    def test_copies_downstream_keep_a_function_graphed(self):
        alone, copied = part((20, 10), (23, 10)), Handed(copied=1, copied_bytes=25_000_000)
        self.assertIs(self.way(alone), UNGRAPHED)
        self.assertIs(self.way(dataclasses.replace(alone, handed=copied)), GRAPHED)
        self.assertIs(self.way(dataclasses.replace(alone, handed=Handed(patched=12))), GRAPHED)

    @given(times, times)
    def test_the_same_both_ways_is_graphed(self, host_us, gpu_us):
        self.assertIs(self.way(part((host_us, gpu_us), (host_us, gpu_us))), GRAPHED)


class TestMeasuredLatency(TestCase):
    """Calls that found the GPU idle give the time of a step; the model guesses it from the number of launches."""

    def part(self, ungraphed_us, graphed_us, **more):
        ungraphed, graphed = Call(140, 210, ungraphed_us), Call(45, 210, graphed_us)
        return Part([ungraphed] * 6, [graphed] * 6, 10, **more)

    def test_long_kernels_at_the_end(self):
        """The GPU waits for the host first; the model says 224 us."""
        modelled = compare([self.part(None, 255)]).latency
        self.assertEqual((modelled.ungraphed_us, modelled.graphed_us), (224, 255))
        measured = compare([self.part(275, 255)]).latency
        self.assertEqual((measured.ungraphed_us, measured.graphed_us), (275, 255))
        self.assertIs(decide(compare([self.part(275, 255)])).way, GRAPHED)
        self.assertIs(decide(compare([self.part(224, 255)])).way, UNGRAPHED)

    def test_a_modelled_latency_is_no_reason_for_ungraphed_code(self):
        found = compare([self.part(None, 255)])
        self.assertTrue(found.latency.is_modelled and found.latency.is_better(UNGRAPHED))
        self.assertIs(decide(found).way, GRAPHED)
        better = compare([part((140, 190), (45, 210), 10)])
        self.assertIs(decide(better).way, UNGRAPHED)
        self.assertEqual(decide(better).text, "un-graphed: 190 us a call against 210 us (0 kernels, without waiting)")

    def test_a_modelled_latency_is_a_reason_against_ungraphed_code(self):
        worse = compare([part((60, 38), (50, 40), 9)])
        self.assertTrue(worse.throughput.is_worse(UNGRAPHED) or worse.latency.is_worse(UNGRAPHED))
        self.assertIs(decide(worse).way, GRAPHED)

    def test_enough_pairs_must_be_measured(self):
        one, other = self.part(275, 255), self.part(None, 255)
        for measured, latency in ((5, (275, 255)), (4, (224, 255))):
            calls = [*one.ungraphed[:measured], *other.ungraphed[: 6 - measured]]
            found = compare([dataclasses.replace(one, ungraphed=calls)]).latency
            self.assertEqual((found.ungraphed_us, found.graphed_us), latency)
            self.assertEqual(found.is_modelled, measured < 5)

    def test_throughput_is_as_before(self):
        self.assertEqual(compare([self.part(275, 255)]).throughput, compare([self.part(None, None)]).throughput)

    def test_work_for_later_functions_is_added(self):
        handed = Handed(patched=10)
        found = compare([self.part(200, 255, handed=handed)]).latency
        self.assertEqual(found.ungraphed_us, 200 + Costs().of_handed(handed).host_us)

    def test_both_calls_of_a_pair_must_be_measured(self):
        for ungraphed_us, graphed_us in ((275, None), (None, 255), (None, None)):
            self.assertEqual(compare([self.part(ungraphed_us, graphed_us)]).latency.ungraphed_us, 224)

    def test_several_parts_are_modelled(self):
        parts = [self.part(275, 255)] * 2
        self.assertEqual(compare(parts).latency, compare([self.part(None, None)] * 2).latency)


class TestNoise(TestCase):
    def jittered(self, shift_us, jitter_us, pairs=10):
        noise = [jitter_us * (-1) ** n * (1 + n % 3) for n in range(pairs)]
        ungraphed = [Call(100 + n, 5) for n in noise]
        return Part(ungraphed, [Call(100 + shift_us - n, 5) for n in noise])

    def test_a_difference_needs_three_standard_errors_and_two_percent(self):
        for shift_us, jitter_us, way in ((1.5, 0, GRAPHED), (5, 0, UNGRAPHED), (5, 3, GRAPHED), (30, 3, UNGRAPHED)):
            self.assertIs(decide(compare([self.jittered(shift_us, jitter_us)])).way, way, (shift_us, jitter_us))

    def test_one_interrupted_call_does_not_count(self):
        quiet = self.jittered(10, 0)
        disturbed = dataclasses.replace(quiet, ungraphed=[*quiet.ungraphed[:-1], Call(90_000, 5)])
        self.assertIs(decide(compare([disturbed])).way, UNGRAPHED)

    def test_a_comparison_is_clear_if_more_pairs_would_not_change_it(self):
        for first, is_clear in (
            (gain(100, 150, noise_us=10), True),
            (gain(100, 150, noise_us=60), False),
            (gain(100, 100.5, noise_us=0.1), True),  # equally fast
            (gain(100, 101.5, noise_us=1), False),
        ):
            self.assertEqual(compared(first).is_clear, is_clear, first)
        self.assertFalse(compared(gain(100, 150), gain(100, 150, noise_us=60)).is_clear)

    def test_too_few_pairs_are_no_decision(self):
        with self.assertRaisesRegex(TooFewPairs, "needs 5 pairs of calls of every part; got 4"):
            compare([part((1, 1), (1, 1)), Part([Call(1, 1)] * 9, [Call(1, 1)] * 4)])
        with self.assertRaises(TooFewPairs):
            compare([])


class TestNextWay(TestCase):
    def test_ways_alternate_so_that_a_steady_change_favours_neither(self):
        order = [next_way(made) for made in range(2 * RULES.most_pairs)]
        for way in Execution:
            self.assertEqual(sum(n for n, found in enumerate(order) if found is way), sum(range(len(order))) / 2)
        self.assertIsNone(next_way(len(order)))

    @given(st.integers(0, 100), st.booleans())
    def test_no_more_calls_are_measured_than_are_enough(self, made, is_clear):
        if next_way(made, is_clear=is_clear) is None:
            self.assertGreaterEqual(made, 2 * (RULES.fewest_pairs if is_clear else RULES.most_pairs))


class TestText(TestCase):
    def test_a_decision_as_text(self):
        lines = [
            decide(compared(gain(41.2, 58.4), copied_bytes=25_000_000)).text,
            decide(compared(gain(3.0, 2.4))).text,
            decide(compared(gain(41.2, 58.4), copied_bytes=4096)).text,
            decide(compared(gain(1500.0, 1500.0), gain(1500.0, 1600.0), copied_bytes=1_200_000, kernels=1)).text,
        ]
        self.assertExpectedInline(
            "\n".join(lines),
            """\
un-graphed: 41 us a call against 58 us (2 kernels, 25 MB copied)
graphed: 2.4 us a call against 3.0 us (2 kernels, margin 1 us)
un-graphed: 41 us a call against 58 us (2 kernels, under 0.1 MB copied)
un-graphed: 1500 us a call against 1600 us (1 kernel, 1.2 MB copied, without waiting)""",
        )


if __name__ == "__main__":
    run_tests()
