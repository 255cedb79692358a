"""Rules that decide whether a function is graphed: the model of a step, margins, and what measured programs get."""

from __future__ import annotations

import dataclasses
import itertools
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from hypothesis import assume, given
from hypothesis import strategies as st
from torch.testing._internal.common_utils import TestCase, run_tests

from pygraph_trees.selection.decision import (
    Comparison,
    Costs,
    Decision,
    Execution,
    Handed,
    Load,
    Objective,
    Part,
    Restless,
    Rules,
    Timings,
    TooFewCalls,
    compare,
    decide,
    next_way,
    step_us,
    why_never_graphed,
)

LATENCY, THROUGHPUT = Objective.LATENCY, Objective.THROUGHPUT
GRAPHED, UNGRAPHED = Execution.GRAPHED, Execution.UNGRAPHED
RULES = Rules()

times = st.floats(0, 1e5)
grown = st.floats(0, 1e4)
loads = st.builds(Load, times, times, st.integers(1, 40))
timings = st.builds(Timings, times, times, st.integers(1, 40), st.integers(5, 10), st.floats(0, 50))
handed = st.builds(Handed, st.integers(0, 50), st.integers(0, 50), st.integers(0, 10**9))
parts = st.builds(Part, timings, timings, handed)
steps = st.lists(st.one_of(parts, loads), min_size=1, max_size=5)
objectives = st.sampled_from(Objective)


def timed(host_us: float, gpu_us: float, launches: int = 1, calls: int = 8, spread_us: float = 0.0) -> Timings:
    return Timings(host_us, gpu_us, launches, calls, spread_us)


def first(step, objective: Objective) -> Execution:
    return decide(compare(step, objective)).way


def compared(ungraphed_us: float, graphed_us: float, margin_us: float = 2.0) -> Comparison:
    return Comparison(LATENCY, ungraphed_us, graphed_us, margin_us, 10, 2, 0)


def grow(record, **by):
    return dataclasses.replace(record, **{name: getattr(record, name) + more for name, more in by.items()})


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
        # (host, time in the graph, latency, a call without waiting) in us, of tools/bench/results/h200-torch2.11.md
        for name, host_us, gpu_us, latency_us, throughput_us in (
            ("EOS", 38.8, 43, 80, 43),
            ("TKE", 64.4, 238, 299, 238),
            ("DLRM", 81.6, 345, 438, 366),
            ("DR-I", 87.8, 10493, 10404, 10625),
            ("ALNET", 69.9, 239, 313, 251),
        ):
            replay = [timed(host_us, gpu_us).load]
            self.assertEqual(step_us(replay, LATENCY), latency_us, rtol=0.03, atol=0, msg=name)
            self.assertEqual(step_us(replay, THROUGHPUT), throughput_us, rtol=0.06, atol=0, msg=name)


class TestSample(TestCase):
    def test_timings_are_medians_and_their_spread(self):
        found = Timings.of([10, 12, 11, 90, 10.5], [5, 5, 5, 5, 6], 3)
        self.assertEqual(found, Timings(11, 5, 3, 5, 1.5))
        self.assertEqual(Timings.of([10.0], [4.0], 1), Timings(10, 4, 1, 1, 0))
        self.assertEqual(Timings.of([10, 14, 12], [4, 4, 9], 1).spread_us, 9)

    def test_waits_of_the_gpu_are_no_work(self):
        # an idle GPU: the first event is passed at once, the only kernel is launched after 44 us and takes 10
        found = timed(44, 54).without_waits(10.0)
        self.assertEqual(found, timed(44, 10))
        self.assertEqual(step_us([found.load], LATENCY), 54)
        busy = timed(44, 10)
        self.assertEqual(busy.without_waits(11.5), busy)


class TestCosts(TestCase):
    def test_outputs_handed_on_cost_patches_and_copies(self):
        self.assertEqual(Costs().of(Handed()), Load(0, 0))
        self.assertEqual(Costs().of(Handed(patched=10)), Load(9, 0))
        copied = Costs().of(Handed(copied=16, copied_bytes=64 << 20))
        self.assertEqual((copied.host_us, copied.gpu_us), (7.82, 38.0), atol=0.1, rtol=0)

    def test_copies_downstream_keep_a_function_graphed(self):
        alone, reader = Part(timed(20, 10), timed(20, 20)), Load(10, 30)
        self.assertIs(first([alone, reader], LATENCY), UNGRAPHED)
        for outputs in (Handed(copied=1, copied_bytes=25_000_000), Handed(patched=12)):
            handing = dataclasses.replace(alone, handed=outputs)
            self.assertIs(first([handing, reader], LATENCY), GRAPHED)
            self.assertIs(first([handing, Load(0, 500), reader], LATENCY), GRAPHED if outputs.copied else UNGRAPHED)


class TestKinds(TestCase):
    """Programs bound by the host, by the GPU, and by both."""

    def both(self, ungraphed: Timings, graphed: Timings) -> tuple[Execution, Execution]:
        part = Part(ungraphed, graphed)
        return first([part], LATENCY), first([part], THROUGHPUT)

    def test_programs_bound_by_the_host(self):
        self.assertEqual(self.both(timed(500, 100, 50), timed(15, 100)), (GRAPHED, GRAPHED))
        # upstream's replay with its checks and copies, of one kernel
        self.assertEqual(self.both(timed(30, 5), timed(70, 12)), (UNGRAPHED, UNGRAPHED))

    def test_programs_bound_by_the_gpu(self):
        # launches run ahead; the replay adds copies to what the GPU does
        self.assertEqual(self.both(timed(400, 1450, 100), timed(100, 1800)), (UNGRAPHED, UNGRAPHED))
        # the same without copies: nothing to gain, nothing to lose
        self.assertEqual(self.both(timed(400, 1450, 100), timed(5, 1450)), (GRAPHED, GRAPHED))

    def test_programs_bound_by_both(self):
        # what copies add to the GPU's time, a wait for each call makes up for; without waits it counts where it is most
        self.assertEqual(self.both(timed(120, 90, 2), timed(15, 105)), (GRAPHED, GRAPHED))
        self.assertEqual(self.both(timed(80, 100, 2), timed(15, 115)), (GRAPHED, UNGRAPHED))

    def test_the_rest_of_the_step_decides_too(self):
        copies = Part(timed(50, 100, 10), timed(10, 110))
        self.assertIs(first([copies], THROUGHPUT), UNGRAPHED)
        self.assertIs(first([copies, Load(500, 100, 50)], THROUGHPUT), GRAPHED)
        launches = Part(timed(100, 30, 10), timed(10, 40))
        self.assertIs(first([launches], LATENCY), GRAPHED)
        # after a long kernel the launches are free, and the replay's copies are not
        self.assertIs(first([Load(10, 150), launches], LATENCY), UNGRAPHED)
        self.assertIs(first([Load(10, 150), launches], THROUGHPUT), UNGRAPHED)

    def test_forward_and_backward_go_together(self):
        loses, gains = Part(timed(20, 10), timed(30, 35)), Part(timed(400, 100, 40), timed(20, 110))
        self.assertIs(first([loses], LATENCY), UNGRAPHED)
        self.assertIs(first([gains], LATENCY), GRAPHED)
        self.assertIs(first([loses, gains], LATENCY), GRAPHED)
        gains_little = Part(timed(25, 10), timed(20, 5))
        self.assertIs(first([gains_little], LATENCY), GRAPHED)
        self.assertIs(first([loses, gains_little], LATENCY), UNGRAPHED)

    @given(st.lists(parts, min_size=1, max_size=3), st.lists(parts, min_size=1, max_size=3))
    def test_throughput_is_the_sum_of_both(self, some, others):
        def total(step, way, what):
            return sum(getattr(part.timings(way), what) for part in step)

        bare = [dataclasses.replace(part, handed=Handed()) for part in [*some, *others]]
        found = compare(bare, THROUGHPUT)
        for way in Execution:
            expected = max(total(bare, way, "host_us"), total(bare, way, "gpu_us"))
            self.assertEqual(found.step_us(way), expected, rtol=1e-9, atol=1e-6)


class TestMeasuredPrograms(TestCase):
    """An H200, torch 2.11: un-graphed against upstream's graphs, and against graphs that are given addresses."""

    def check(self, ungraphed_us: float, graphed_us: float, expected: Execution, objective=LATENCY, kernels: int = 1):
        # However the measured time is shared between host and GPU.
        for share in (0.1, 0.5, 0.9):
            ways = []
            for time_us in (ungraphed_us, graphed_us):
                pieces = (share * time_us, (1 - share) * time_us)
                ways.append(timed(*pieces) if objective is LATENCY else timed(time_us, time_us * share))
            found = compare([Part(*ways, kernels=kernels)], objective)
            self.assertEqual((found.ungraphed_us, found.graphed_us), (ungraphed_us, graphed_us), rtol=1e-9, atol=0)
            self.assertIs(decide(found).way, expected)

    def test_measured_programs_with_copies_are_ungraphed(self):
        for ungraphed_us, upstream_us in ((54, 91), (322, 463), (1450, 1800)):
            for objective in Objective:
                self.check(ungraphed_us, upstream_us, UNGRAPHED, objective)

    def test_measured_programs_by_address(self):
        self.check(54, 77, UNGRAPHED)  # equation of state, where the replay itself was still slow
        self.check(54, 45, GRAPHED)
        self.check(322, 332, UNGRAPHED, kernels=7)  # turbulent kinetic energy, 3 %
        self.check(322, 330, GRAPHED, kernels=7)
        self.check(1450, 1444, GRAPHED)  # recommender, batch 8192

    def test_the_decision_about_the_equation_of_state(self):
        # 10 us of kernel; 25 MB in copies that take 16; what is said of it
        part = Part(timed(44, 10), timed(65, 26), kernels=1, copied_bytes=25_165_824)
        found = decide(compare([part], LATENCY))
        self.assertEqual(found.text, "un-graphed: 54 us a call against 91 us (1 kernel, 25 MB copied)")
        patched = dataclasses.replace(part, graphed=timed(8, 10), copied_bytes=0)
        self.assertEqual(decide(compare([patched], LATENCY)).text, "graphed: 18 us a call against 54 us (1 kernel)")


class TestMargin(TestCase):
    def test_the_margin_is_a_share_of_the_step_and_of_the_noise(self):
        def margin(step_us, spread_us=0.0, calls=8):
            part = Part(timed(step_us, 0), timed(0, 0, 1, calls, spread_us))
            found = compare([part, Load(1e5, 1e5)], LATENCY)  # what else the step does makes it no larger
            return found.margin_us

        self.assertEqual(margin(10), 2.0)
        self.assertEqual(margin(1000), 30.0)
        self.assertEqual(margin(1000, spread_us=30, calls=9), 40.0)
        self.assertEqual(margin(1000, spread_us=30, calls=900), 31.0)

    def test_needed_for_ungraphed_alone(self):
        self.assertIs(decide(compared(98.0, 100.0)).way, GRAPHED)
        self.assertIs(decide(compared(97.9, 100.0)).way, UNGRAPHED)
        self.assertIs(decide(compared(100.0, 100.0)).way, GRAPHED)

    @given(timings, objectives)
    def test_the_same_both_ways_is_graphed(self, same, objective):
        self.assertIs(first([Part(same, same)], objective), GRAPHED)

    @given(timings, timings, objectives)
    def test_both_ways_are_treated_alike(self, one, other, objective):
        found, turned = (compare([Part(*pair)], objective) for pair in ((one, other), (other, one)))
        self.assertEqual((found.ungraphed_us, found.graphed_us), (turned.graphed_us, turned.ungraphed_us))
        self.assertEqual(found.gain_us(GRAPHED), turned.gain_us(UNGRAPHED))
        ways = [decide(c).way for c in (found, turned)]
        self.assertIn(GRAPHED, ways)
        self.assertEqual(
            UNGRAPHED in ways,
            found.gain_us(UNGRAPHED) > found.margin_us or turned.gain_us(UNGRAPHED) > turned.margin_us,
        )

    @given(steps, st.data(), grown, grown, st.integers(0, 20), st.integers(0, 10**8), objectives)
    def test_a_way_that_gets_worse_is_not_taken_instead(self, step, data, host_us, gpu_us, count, nbytes, objective):
        where = [index for index, part in enumerate(step) if isinstance(part, Part)]
        assume(where)
        at = data.draw(st.sampled_from(where))
        part, before = step[at], first(step, objective)

        def after(**fields):
            return first([*step[:at], dataclasses.replace(part, **fields), *step[at + 1 :]], objective)

        if before is GRAPHED:
            self.assertIs(after(ungraphed=grow(part.ungraphed, host_us=host_us, gpu_us=gpu_us)), GRAPHED)
            self.assertIs(after(handed=grow(part.handed, patched=count, copied=count, copied_bytes=nbytes)), GRAPHED)
            for way in ("ungraphed", "graphed"):
                self.assertIs(after(**{way: grow(getattr(part, way), spread_us=host_us)}), GRAPHED)
        else:
            self.assertIs(after(graphed=grow(part.graphed, host_us=host_us, gpu_us=gpu_us)), UNGRAPHED)

    def test_too_few_calls_are_no_decision(self):
        with self.assertRaisesRegex(
            TooFewCalls, "needs 5 calls each way of every part; got 8 un-graphed and 4 graphed"
        ):
            compare([Part(timed(1, 1), timed(1, 1, calls=4))], LATENCY)
        with self.assertRaises(TooFewCalls):
            compare([Part(timed(1, 1), timed(1, 1)), Part(timed(1, 1, calls=0), timed(1, 1))], LATENCY)


class TestStanding(TestCase):
    def run_through(self, measurements, standing=None):
        ways = []
        for ungraphed_us, graphed_us in measurements:
            standing = decide(compared(ungraphed_us, graphed_us), standing)
            ways.append(standing.way)
        return standing, ways

    def test_changes_after_three_in_a_row(self):
        _, ways = self.run_through([(100, 100), (90, 100), (90, 100), (90, 100), (90, 100)])
        self.assertEqual(ways, [GRAPHED, GRAPHED, GRAPHED, UNGRAPHED, UNGRAPHED])
        _, ways = self.run_through([(90, 100), (100, 90), (100, 90), (100, 90)])
        self.assertEqual(ways, [UNGRAPHED, UNGRAPHED, UNGRAPHED, GRAPHED])

    def test_one_measurement_for_a_decision_clears_those_against_it(self):
        standing, ways = self.run_through([(100, 100), (90, 100), (90, 100), (96, 100), (90, 100), (90, 100)])
        self.assertEqual(set(ways), {GRAPHED})
        self.assertEqual(standing.against, 2)
        self.assertIn("not yet changed: 2 in a row speak against it", standing.text)

    @given(st.sampled_from(Execution), st.lists(st.floats(-4, 4), max_size=40))
    def test_never_changes_within_twice_the_margin(self, way, noise):
        _, ways = self.run_through([(100.0, 100.0 + n) for n in noise], Decision(way, compared(100, 100)))
        self.assertLessEqual(set(ways), {way})

    @given(st.floats(-50, 50), st.lists(st.floats(-2, 2), min_size=1, max_size=40))
    def test_noise_of_a_margin_changes_it_once_at_most(self, difference, noise):
        _, ways = self.run_through([(100.0, 100.0 + difference + n) for n in noise])
        self.assertLessEqual(sum(a is not b for a, b in itertools.pairwise(ways)), 1)

    @given(st.sampled_from(Execution), st.floats(4.01, 90))
    def test_a_steady_gain_arrives(self, way, gain_us):
        measurement = (100.0 - gain_us, 100.0) if way is GRAPHED else (100.0, 100.0 - gain_us)
        _, ways = self.run_through([measurement] * RULES.flips_after, Decision(way, compared(100, 100)))
        self.assertEqual(ways, [way, way, way.other])


class TestNextWay(TestCase):
    @given(st.booleans())
    def test_calls_are_few_and_in_order(self, clear):
        counts = {UNGRAPHED: 0, GRAPHED: 0}
        order = []
        while (way := next_way(counts[UNGRAPHED], counts[GRAPHED], clear)) is not None:
            counts[way] += 1
            order.append(way)
        self.assertEqual(order, sorted(order, key=lambda way: way is GRAPHED))
        self.assertEqual(len(order), 2 * RULES.fewest_calls if clear else RULES.most_calls)

    @given(st.integers(0, 100), st.integers(0, 100), st.booleans())
    def test_no_more_calls_are_measured_than_are_enough(self, ungraphed_calls, graphed_calls, clear):
        way = next_way(ungraphed_calls, graphed_calls, clear)
        if way is None:
            self.assertGreaterEqual(min(ungraphed_calls, graphed_calls), RULES.fewest_calls)
        elif min(ungraphed_calls, graphed_calls) >= RULES.fewest_calls:
            self.assertLess(ungraphed_calls + graphed_calls, RULES.most_calls)


class TestNeverGraphed(TestCase):
    """Functions that are recorded again at each call."""

    def why(self, *parts):
        return why_never_graphed([Restless(*part) for part in parts])

    def test_a_function_recorded_again_at_each_call_is_not_graphed_if_that_costs(self):
        part = ([100.0] * 5, [5e4] * 20, 4)
        for parts, is_why in (
            ([part], True),
            ([part, part], True),
            ([part, ([100.0] * 5, [5e4] * 20, 20)], True),  # there were not enough of the other one's
            ([([100.0] * 5, [5e4] * 20, 5)], False),
            ([([100.0] * 5, [5e4] * 19, 0)], False),
            ([([100.0] * 4, [5e4] * 20, 0)], False),
            ([part, ([], [], 0)], False),
            ([([100.0] * 5, [106.0] * 20, 0)], False),  # twice the margin
            ([([100.0] * 5, [106.5] * 20, 0)], True),
            ([([1.0] * 5, [5.0] * 20, 0)], False),
            ([([1.0] * 5, [5.5] * 20, 0)], True),
            ([], False),
        ):
            self.assertEqual(self.why(*parts) is not None, is_why, msg=str(parts))

    def test_the_reason_as_text(self):
        self.assertExpectedInline(
            self.why(([100.0] * 5, [5e4] * 60, 1), ([50.0] * 5, [1e4] * 60, 2)),
            """un-graphed: the host takes 150 us a call against 60000 us, and 1 of 60 graphed calls were replays""",
        )


class TestText(TestCase):
    def test_a_decision_as_text(self):
        big = dataclasses.replace(compared(41.2, 58.4), copied_bytes=25_000_000)
        lines = [decide(c).text for c in (big, compared(3.0, 2.0), dataclasses.replace(big, copied_bytes=4096))]
        lines.append(decide(dataclasses.replace(compared(1500.0, 1400.0), copied_bytes=1_200_000, kernels=1)).text)
        self.assertExpectedInline(
            "\n".join(lines),
            """\
un-graphed: 41 us a call against 58 us (2 kernels, 25 MB copied)
graphed: 2.0 us a call against 3.0 us (2 kernels, margin 2 us)
un-graphed: 41 us a call against 58 us (2 kernels, under 0.1 MB copied)
graphed: 1400 us a call against 1500 us (1 kernel, 1.2 MB copied)""",
        )


if __name__ == "__main__":
    run_tests()
