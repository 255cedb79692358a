"""Rules that decide whether functions are graphed: plain facts, the model of a step, gains, and the ways to measure."""

import dataclasses

from hypothesis import given
from hypothesis import strategies as st
from torch.testing._internal.common_utils import TestCase, run_tests

from pygraph_trees.selection import decision
from pygraph_trees.selection.decision import Call, Comparison, Execution, Facts, Gain, Part, compare, decide

GRAPHED, UNGRAPHED = Execution.GRAPHED, Execution.UNGRAPHED

times = st.floats(0, 1e5)
loads = st.builds(Call, times, times, launches=st.integers(1, 40))
facts = st.builds(Facts, st.integers(0, 400), st.integers(0, 40), st.integers(0, 40), st.integers(0, 10**9))


def part(ungraphed, graphed, launches=1, pairs=8, **more):
    """A function whose calls all take the same times, ``(host, gpu)`` or ``(host, gpu, from idle)`` in us."""
    return Part([Call(*ungraphed)] * pairs, [Call(*graphed)] * pairs, Facts(launches), **more)


def gain(ungraphed_us, graphed_us, noise_us=0.0):
    return Gain(ungraphed_us, graphed_us, graphed_us - ungraphed_us, max(1.0, 0.02 * ungraphed_us), noise_us)


def compared(latency, throughput=None):
    return Comparison(latency, latency if throughput is None else throughput, [Facts(2)])


class TestPlain(TestCase):
    def test_what_is_plain(self):
        for way, *parts in (
            (GRAPHED, Facts(30, by_address=20)),
            (GRAPHED, Facts(2, by_address=1)),
            (GRAPHED, Facts(2), Facts(2)),  # decided together
            (None, Facts(1)),
            (None, Facts(20, has_fast_path=False)),
            (None, Facts(None)),
            (GRAPHED, Facts(2), Facts(200, has_fast_path=False)),
            (UNGRAPHED, Facts(1, copied=3, copied_bytes=100_000_000)),
            (None, Facts(1, copied=3, copied_bytes=25_000_000)),  # the host may take as long to launch one kernel
            (None, Facts(1, by_address=3)),  # the equation of state
            (None, Facts(7, by_address=21)),  # turbulent kinetic energy
            # Un-graphed code launches while the GPU computes; what a replay does before its launch is measured.
            (None, Facts(100, copied=1, copied_bytes=200_000_000)),
            (None, Facts(30, copied=1, copied_bytes=1000)),
            (None, Facts(60, by_address=100)),
        ):
            self.assertIs(decision.plain_way(parts), way, parts)

    @given(st.lists(facts, min_size=1, max_size=3), st.integers(0, 100), st.integers(0, 20), st.integers(0, 10**8))
    def test_work_for_a_replay_never_makes_it_plainly_better(self, parts, launches, count, nbytes):
        first, *others = parts
        by_address, copied, copied_bytes = first.by_address + count, first.copied + count, first.copied_bytes
        copied_bytes += nbytes if count else 0
        more = dataclasses.replace(first, by_address=by_address, copied=copied, copied_bytes=copied_bytes)
        if decision.plain_way(parts) is not GRAPHED:
            self.assertIsNot(decision.plain_way([more, *others]), GRAPHED)
        more = dataclasses.replace(first, launches=first.launches + launches)
        if decision.plain_way(parts) is not UNGRAPHED:
            self.assertIsNot(decision.plain_way([more, *others]), UNGRAPHED)


class TestStep(TestCase):
    @given(st.lists(loads, max_size=5))
    def test_latency_is_what_a_simulation_of_each_piece_gives(self, work):
        """Throughput is at best, and latency at worst."""
        host = gpu = 0.0
        for load in work:
            for _ in range(load.launches):
                host += load.host_us / load.launches
                gpu = max(gpu, host) + load.gpu_us / load.launches
        self.assertEqual(decision.latency_us(work), max(host, gpu), rtol=1e-9, atol=1e-6)
        self.assertLessEqual(decision.throughput_us(work), decision.latency_us(work) + 1e-6)
        self.assertLessEqual(decision.latency_us(work), sum(decision.latency_us([load]) for load in work) + 1e-6)

    def test_kinds_of_programs(self):
        loses, gains, alone = part((20, 10), (30, 35)), part((400, 100), (20, 110), 40), part((20, 10), (23, 10))
        for way, *parts in (
            # bound by the host: upstream's replay of one kernel, with its checks and copies
            (UNGRAPHED, part((30, 5), (70, 12))),
            # bound by the GPU: launches run ahead, and the replay adds copies; without them, nothing is lost
            (UNGRAPHED, part((400, 1450), (100, 1800), 100)),
            (GRAPHED, part((400, 1450), (5, 1450), 100)),
            # a forward and its backward go together
            (UNGRAPHED, loses),
            (GRAPHED, gains),
            (GRAPHED, loses, gains),
            # patches downstream keep a function graphed
            (UNGRAPHED, alone),
            (GRAPHED, dataclasses.replace(alone, handed=12)),
            # a gain of latency is no reason to lose throughput
            (GRAPHED, part((60, 40, 64), (50, 40, 90), 9)),
        ):
            self.assertIs(decide(compare(parts)), way, parts)
        # The GPU is idle: it passes the first event at once; the only kernel is launched after 44 us and takes 10.
        found = compare([part((44, 54), (8, 10))])
        self.assertEqual((found.latency.ungraphed_us, found.latency.graphed_us), (54, 18))


class TestMeasuredLatency(TestCase):
    """Calls that found the GPU idle give the time of a step; the model guesses it from the number of launches."""

    def part(self, ungraphed_us, graphed_us, **more):
        return part((140, 210, ungraphed_us), (45, 210, graphed_us), 10, pairs=6, **more)

    def test_long_kernels_at_the_end(self):
        """The GPU waits for the host first; the model says 224 us, unless both calls of a pair are measured."""
        for ungraphed_us, graphed_us, latency, way in (
            (275, 255, (275, 255), GRAPHED),
            (224, 255, (224, 255), UNGRAPHED),
            (None, 255, (224, 255), GRAPHED),  # a modelled latency is no reason for un-graphed code
            (275, None, (224, 255), GRAPHED),
        ):
            found = compare([self.part(ungraphed_us, graphed_us)])
            self.assertEqual((found.latency.ungraphed_us, found.latency.graphed_us), latency)
            self.assertEqual(found.is_modelled, None in (ungraphed_us, graphed_us))
            self.assertIs(decide(found), way)
            self.assertEqual(found.throughput, compare([self.part(None, None)]).throughput)

    def test_throughput_is_a_reason_for_ungraphed_code_although_latency_is_modelled(self):
        better = compare([part((140, 190), (45, 210), 10)])
        self.assertIs(decide(better), UNGRAPHED)
        self.assertRegex(better.text(UNGRAPHED), "^un-graphed: 190 us a call against 210 us .*, without waiting")
        self.assertRegex(better.text(GRAPHED), ", margin 4.08 us\\)$")

    def test_enough_pairs_must_be_measured(self):
        one, other = self.part(275, 255), self.part(None, 255)
        for measured, ungraphed_us in ((decision.FEWEST_PAIRS, 275), (decision.FEWEST_PAIRS - 1, 224)):
            calls = [*one.ungraphed[:measured], *other.ungraphed[: 6 - measured]]
            found = compare([dataclasses.replace(one, ungraphed=calls)])
            facts = found.latency.ungraphed_us, found.is_modelled
            self.assertEqual(facts, (ungraphed_us, measured < decision.FEWEST_PAIRS))

    def test_several_parts_are_modelled(self):
        self.assertEqual(compare([self.part(275, 255)] * 2), compare([self.part(None, None)] * 2))
        handed = compare([self.part(200, 255, handed=10)])  # work for later functions is added
        self.assertEqual(handed.latency.ungraphed_us, 209)


class TestNoise(TestCase):
    def jittered(self, shift_us, jitter_us, pairs=10):
        noise = [jitter_us * (-1) ** n * (1 + n % 3) for n in range(pairs)]
        return Part([Call(100 + n, 5) for n in noise], [Call(100 + shift_us - n, 5) for n in noise], Facts(2))

    def test_a_difference_needs_three_standard_errors_and_two_percent(self):
        for shift_us, jitter_us, way in ((1.5, 0, GRAPHED), (5, 0, UNGRAPHED), (5, 3, GRAPHED), (30, 3, UNGRAPHED)):
            self.assertIs(decide(compare([self.jittered(shift_us, jitter_us)])), way, (shift_us, jitter_us))
        quiet = self.jittered(10, 0)
        disturbed = dataclasses.replace(quiet, ungraphed=[*quiet.ungraphed[:-1], Call(90_000, 5)])  # one call
        self.assertIs(decide(compare([disturbed])), UNGRAPHED)

    def test_a_comparison_is_clear_if_more_pairs_would_not_change_it(self):
        noisy = gain(100, 150, noise_us=60)
        for found, is_clear in (
            (compared(gain(100, 150, noise_us=10)), True),
            (compared(noisy), False),
            (compared(gain(100, 150), noisy), False),
            (compared(gain(100, 100.5, noise_us=0.1)), True),  # equally fast
            (compared(gain(100, 101.5, noise_us=1)), False),
        ):
            self.assertEqual(found.is_clear, is_clear, found)


class TestNextWay(TestCase):
    def test_ways_alternate_so_that_a_steady_change_favours_neither(self):
        """No more calls are measured than are enough."""
        made, order = dict.fromkeys(Execution, 0), []
        for count in range(2 * decision.MOST_PAIRS + 1):
            is_enough = count == 2 * decision.MOST_PAIRS or (count >= 2 * decision.FEWEST_PAIRS and count % 2 == 0)
            self.assertEqual(decision.next_way(made, is_clear=True) is None, is_enough)
            order.append(decision.next_way(made))
            if order[-1] is not None:
                made[order[-1]] += 1
        self.assertIsNone(order.pop())
        for way in Execution:
            self.assertEqual(sum(n for n, found in enumerate(order) if found is way), sum(range(len(order))) / 2)

    def test_a_way_that_a_step_did_not_measure_follows(self):
        self.assertIs(decision.next_way({GRAPHED: 100, UNGRAPHED: 0}, is_clear=True), UNGRAPHED)
        self.assertIs(decision.next_way({GRAPHED: 4, UNGRAPHED: 100}), GRAPHED)
        self.assertIsNone(decision.next_way({GRAPHED: 100, UNGRAPHED: decision.FEWEST_PAIRS}))


if __name__ == "__main__":
    run_tests()
