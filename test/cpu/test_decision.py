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
    def test_what_is_plain(self):
        for way, *parts in (
            (GRAPHED, Facts(30)),
            (GRAPHED, Facts(274, by_address=3)),
            (GRAPHED, Facts(60, by_address=6)),
            (GRAPHED, Facts(20)),
            (None, Facts(20, has_fast_path=False)),
            (GRAPHED, Facts(2), Facts(200)),  # decided together
            (UNGRAPHED, Facts(1, copied=3, copied_bytes=25_000_000)),
            (None, Facts(1, by_address=3)),  # the equation of state
            (None, Facts(7, by_address=21)),  # turbulent kinetic energy
            # Un-graphed code launches while the GPU computes; what a replay does before its launch is measured.
            (None, Facts(100, copied=1, copied_bytes=200_000_000)),
            (None, Facts(30, copied=1, copied_bytes=1000)),
            (None, Facts(60, by_address=100)),
            (None, Facts(30, by_address=20)),
        ):
            self.assertIs(plain_way(parts), way, parts)

    @given(st.lists(facts, min_size=1, max_size=3), st.integers(0, 100), st.integers(0, 20), st.integers(0, 10**8))
    def test_work_for_a_replay_never_makes_it_plainly_better(self, parts, launches, count, nbytes):
        first, *others = parts
        more = grow(first, by_address=count, copied=count, copied_bytes=nbytes if count else 0)
        if plain_way(parts) is not GRAPHED:
            self.assertIsNot(plain_way([more, *others]), GRAPHED)
        if plain_way(parts) is not UNGRAPHED:
            self.assertIsNot(plain_way([grow(first, launches=launches), *others]), UNGRAPHED)


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
        # (host, time in the graph, latency, a call without waiting) in us, on an H200
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

    def test_kinds(self):
        loses, gains = part((20, 10), (30, 35)), part((400, 100), (20, 110), 40)
        alone, copied = part((20, 10), (23, 10)), Handed(copied=1, copied_bytes=25_000_000)
        for way, *parts in (
            # bound by the host: many kernels, and upstream's replay of one, with its checks and copies
            (GRAPHED, part((500, 100), (15, 100), 50)),
            (UNGRAPHED, part((30, 5), (70, 12))),
            # bound by the GPU: launches run ahead, and the replay adds copies; without them, nothing is lost
            (UNGRAPHED, part((400, 1450), (100, 1800), 100)),
            (GRAPHED, part((400, 1450), (5, 1450), 100)),
            # programs that were measured with copies
            *((UNGRAPHED, part((one / 2,) * 2, (other / 2,) * 2)) for one, other in ((54, 91), (322, 463))),
            # a forward and its backward go together
            (UNGRAPHED, loses),
            (GRAPHED, gains),
            (GRAPHED, loses, gains),
            # copies and patches downstream keep a function graphed
            (UNGRAPHED, alone),
            (GRAPHED, dataclasses.replace(alone, handed=copied)),
            (GRAPHED, dataclasses.replace(alone, handed=Handed(patched=12))),
        ):
            self.assertIs(decide(compare(parts)).way, way, parts)

    def test_a_way_that_gains_latency_and_loses_throughput_is_not_taken(self):
        """Un-graphed code is taken only if it is worse in neither."""
        found = compare([part((60, 40), (50, 40), 9)])  # un-graphed launches overlap with the GPU
        self.assertGreater(found.latency.gain_us, found.latency.needed_us)
        self.assertTrue(found.throughput.is_worse(UNGRAPHED))
        self.assertIs(decide(found).way, GRAPHED)

    @given(times, times)
    def test_the_same_both_ways_is_graphed(self, host_us, gpu_us):
        self.assertIs(decide(compare([part((host_us, gpu_us), (host_us, gpu_us))])).way, GRAPHED)


class TestMeasuredLatency(TestCase):
    """Calls that found the GPU idle give the time of a step; the model guesses it from the number of launches."""

    def part(self, ungraphed_us, graphed_us, **more):
        ungraphed, graphed = Call(140, 210, ungraphed_us), Call(45, 210, graphed_us)
        return Part([ungraphed] * 6, [graphed] * 6, 10, **more)

    def test_long_kernels_at_the_end(self):
        """The GPU waits for the host first; the model says 224 us, unless both calls of a pair are measured."""
        for ungraphed_us, graphed_us, latency, way in (
            (275, 255, (275, 255), GRAPHED),
            (224, 255, (224, 255), UNGRAPHED),
            (None, 255, (224, 255), GRAPHED),  # a modelled latency is no reason for un-graphed code
            (275, None, (224, 255), GRAPHED),
            (None, None, (224, 255), GRAPHED),
        ):
            found = compare([self.part(ungraphed_us, graphed_us)])
            self.assertEqual((found.latency.ungraphed_us, found.latency.graphed_us), latency)
            self.assertEqual(found.latency.is_modelled, None in (ungraphed_us, graphed_us))
            self.assertIs(decide(found).way, way)
            self.assertEqual(found.throughput, compare([self.part(None, None)]).throughput)

    def test_throughput_is_a_reason_for_ungraphed_code_although_latency_is_modelled(self):
        better = compare([part((140, 190), (45, 210), 10)])
        self.assertIs(decide(better).way, UNGRAPHED)
        self.assertEqual(decide(better).text, "un-graphed: 190 us a call against 210 us (0 kernels, without waiting)")

    def test_enough_pairs_must_be_measured(self):
        one, other = self.part(275, 255), self.part(None, 255)
        for measured, ungraphed_us in ((5, 275), (4, 224)):
            calls = [*one.ungraphed[:measured], *other.ungraphed[: 6 - measured]]
            found = compare([dataclasses.replace(one, ungraphed=calls)]).latency
            self.assertEqual((found.ungraphed_us, found.is_modelled), (ungraphed_us, measured < 5))

    def test_work_for_later_functions_is_added(self):
        handed = Handed(patched=10)
        found = compare([self.part(200, 255, handed=handed)]).latency
        self.assertEqual(found.ungraphed_us, 200 + Costs().of_handed(handed).host_us)

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
            plain_text(GRAPHED, [Facts(12), Facts(30)]),
            plain_text(UNGRAPHED, [Facts(1, copied=1, copied_bytes=25_000_000)]),
            decide(compared(gain(3.0, 2.4))).text,
            decide(compared(gain(41.2, 58.4), copied_bytes=4096)).text,
            decide(compared(gain(1500.0, 1500.0), gain(1500.0, 1600.0), copied_bytes=1_200_000, kernels=1)).text,
        ]
        self.assertExpectedInline(
            "\n".join(lines),
            """\
graphed: 42 launches in 2 replays, without a measurement
un-graphed: 1 launch in one replay, 25 MB copied, without a measurement
graphed: 2.4 us a call against 3.0 us (2 kernels, margin 1 us)
un-graphed: 41 us a call against 58 us (2 kernels, under 0.1 MB copied)
un-graphed: 1500 us a call against 1600 us (1 kernel, 1.2 MB copied, without waiting)""",
        )


if __name__ == "__main__":
    run_tests()
