"""The rule that chooses routes: its thresholds, its single decision, and the effects."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Collection, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

sys.path[:0] = [str(Path(__file__).resolve().parents[2]), str(Path(__file__).resolve().parent)]

import torch
from test_launches import FakeAutotuner
from torch.testing._internal.common_utils import TestCase, run_tests

from pygraph_trees.indirection import route_rule, sampler
from pygraph_trees.indirection.route_rule import SAMPLES, Facts, Reason, choose_route
from pygraph_trees.indirection.sampler import EVERY, Sampler, sampler_for
from pygraph_trees.indirection.table import builds
from pygraph_trees.indirection.table import pointer_table as table
from pygraph_trees.indirection.table.pointer_table import Reader
from pygraph_trees.report.log import FunctionLog, RecordingLog


class Function:
    def __init__(self) -> None:
        self.log = FunctionLog("f", None, "inference", 1, {})


class TestRule(TestCase):
    def assertChosen(self, reason: Reason, text: str, **facts: float) -> None:
        choice = choose_route(Facts(**(dict(kernels=16, inputs=4, host_bound=5) | facts)))
        self.assertEqual((choice.reason, str(choice)), (reason, text))

    def test_a_table_needs_16_kernels_4_inputs_and_5_host_bound_samples(self) -> None:
        self.assertChosen(Reason.TABLE_AWAITED, "by address, until a table for 16 kernels that read 4 inputs is built")

    def test_15_kernels_are_patched(self) -> None:
        text = "by address: 15 kernels could read inputs from a table, fewer than 16"
        self.assertChosen(Reason.FEW_KERNELS, text, kernels=15)

    def test_3_inputs_are_patched(self) -> None:
        text = "by address: the addresses of 3 inputs that a table could hold change, fewer than 4"
        self.assertChosen(Reason.FEW_INPUTS, text, inputs=3)

    def test_inputs_that_move_in_less_than_a_quarter_of_replays_are_patched(self) -> None:
        text = "by address: addresses change in 24% of replays, fewer than 25%"
        self.assertChosen(Reason.SELDOM, text, share=0.24)
        self.assertEqual(choose_route(Facts(16, 4, 5, 0.25)).reason, Reason.TABLE_AWAITED)

    def test_half_of_the_samples_are_not_most_of_them(self) -> None:
        text = "by address: the GPU was idle before 4 of 8 sampled replays, which is not most of them"
        self.assertChosen(Reason.GPU_BOUND, text, host_bound=4)


class SamplerTestCase(TestCase):
    """A function whose 6 inputs are read by 20 kernels with variants and one without; a build takes 2 steps."""

    def setUp(self) -> None:
        super().setUp()
        self.function = Function()
        self.is_idle, self.is_capturing, self.is_built = True, False, True
        self.steps, self.reasons = 2, list[str]()
        self.moved: Sequence[int] = range(5)
        self.kernels: Sequence[str | None] = [*["kernel"] * 20, "other", None]
        inputs = frozenset((f"in_ptr{index}", index) for index in range(6))
        self.readers = {0: Reader(FakeAutotuner("kernel"), frozenset({"in_ptr0"}), inputs)}
        stream = SimpleNamespace(query=lambda: self.is_idle)
        for target, name, value in (
            (route_rule, "_choices", weakref.WeakKeyDictionary()),
            (sampler, "_waiting", weakref.WeakSet()),
            (builds, "_builds", weakref.WeakKeyDictionary()),
            (builds, "go_on", self.go_on),
            (table, "_readers", weakref.WeakKeyDictionary({self.function: self.readers})),
            (table, "_taken", weakref.WeakKeyDictionary()),
            (torch.cuda, "current_stream", lambda device: stream),
            (torch.cuda, "is_current_stream_capturing", lambda: self.is_capturing),
        ):
            patch = mock.patch.object(target, name, value)
            patch.start()
            self.addCleanup(patch.stop)

    def go_on(self, function: Any) -> bool | None:
        self.steps -= 1
        if self.steps > 0:
            return None
        builds._builds[function].give_up()
        if self.is_built:
            table.take(function, {0})
        return self.is_built

    def made(self, sizes: int = 0) -> Sampler:
        """The sampler of a recording that was just made."""
        self.log = RecordingLog()
        sampler = sampler_for(self.function, sizes, 0, self.log)
        assert sampler is not None
        sampler.ready = self.reasons.append
        return sampler

    def names(self, indices: Collection[int]) -> Sequence[str | None]:
        return self.kernels if indices else ()

    def samples(self, sampler: Sampler, count: int, *, every: int = EVERY, nodes: int = 22) -> int:
        """The number of samples until no more are wanted, ``count`` at most; nodes are set each ``every`` replays."""
        for number in range(count):
            self.log.counter.value += EVERY
            set_calls = self.log.replays // (every // EVERY or 1) * nodes
            self.assertTrue(sampler.is_due())
            if not sampler.sample(self.moved, nodes, set_calls, self.names):
                return number + 1
        return count

    @property
    def choice(self) -> Reason | None:
        found = route_rule.choice_of(self.function, 0)
        return None if found is None else found.reason


class TestSampler(SamplerTestCase):
    def test_eight_samples_decide(self) -> None:
        sampler = self.made()
        self.assertEqual(self.samples(sampler, SAMPLES - 1), SAMPLES - 1)
        self.assertIsNone(self.choice)
        self.assertTrue(self.samples(sampler, 1))
        self.assertEqual((self.choice, self.function.log.awaits_table), (Reason.TABLE_AWAITED, True))
        self.assertEqual(
            self.function.log.route, "by address, until a table for 20 kernels that read 5 inputs is built"
        )

    def test_a_table_that_is_built_is_recorded_once(self) -> None:
        self.assertEqual(self.samples(self.made(), 100), SAMPLES + 2)
        self.assertEqual(self.reasons, ["its inputs are read from a table from now on"])
        route_rule.recorded(self.function, 0, reads_table=True)
        self.assertEqual((self.choice, self.function.log.awaits_table), (Reason.TABLE, False))
        self.assertEqual(
            self.function.log.route,
            "by table: 20 kernels read 5 inputs whose addresses change, "
            "and the GPU was idle before 8 of 8 sampled replays",
        )
        self.assertIsNone(sampler_for(self.function, 0, 0, self.log))

    def test_a_decision_against_a_table_ends_the_samples_for_good(self) -> None:
        for moved, kernels, is_idle, reason in (
            (range(3), self.kernels, True, Reason.FEW_INPUTS),
            (range(3, 9), self.kernels, True, Reason.FEW_INPUTS),  # no kernel reads the last three in a table
            (range(6), self.kernels[5:], True, Reason.FEW_KERNELS),
            (range(6), self.kernels, False, Reason.GPU_BOUND),
        ):
            self.function = Function()
            table._readers[self.function] = self.readers
            self.moved, self.kernels, self.is_idle = moved, kernels, is_idle
            self.assertEqual(self.samples(self.made(), 100), SAMPLES)
            self.assertEqual((self.choice, self.reasons), (reason, []))
            # Recorded again it is patched without a sample, also if another size of the function has a table by then.
            table.take(self.function, {0})
            self.assertIsNone(sampler_for(self.function, 0, 0, self.log))
            self.assertFalse(route_rule.may_use_table(self.function, 0))
            self.assertTrue(route_rule.may_use_table(self.function, 1))
            self.kernels = [*["kernel"] * 20, "other", None]

    def test_inputs_that_seldom_move_stay_by_address(self) -> None:
        for every, reason in (
            (EVERY, Reason.TABLE_AWAITED),
            (4 * EVERY, Reason.TABLE_AWAITED),
            (8 * EVERY, Reason.SELDOM),
        ):
            self.function = Function()
            table._readers[self.function] = self.readers
            self.samples(self.made(), SAMPLES, every=every)
            self.assertEqual(self.choice, reason, str(every))

    def test_replays_at_which_no_address_changes_are_no_samples(self) -> None:
        """Nodes may still be set, since other memory can be at the same address."""
        for still, reason in ((8, Reason.TABLE_AWAITED), (100, Reason.SELDOM)):
            self.function = Function()
            table._readers[self.function] = self.readers
            sampler, moved = self.made(), self.moved
            self.moved = ()
            self.assertEqual(self.samples(sampler, still), still)
            self.assertIsNone(self.choice)
            self.moved = moved
            self.samples(sampler, SAMPLES)
            self.assertEqual(self.choice, reason, str(still))

    def test_a_recording_made_again_while_a_table_is_built_goes_on_with_it(self) -> None:
        self.samples(self.made(), SAMPLES)
        self.assertEqual((self.samples(self.made(), 100), len(self.reasons)), (2, 1))

    def test_another_recording_of_these_sizes_takes_over_the_decision(self) -> None:
        other, log = self.made(), self.log
        self.samples(other, 1)
        self.is_idle = False
        self.samples(self.made(), SAMPLES)
        self.log, self.is_idle = log, True
        self.assertEqual((self.samples(other, 100), self.choice), (1, Reason.GPU_BOUND))

    def test_functions_wait_for_each_other(self) -> None:
        """A function after another one in a step is recorded again with it."""
        sampler, other = self.made(), Function()
        builds.begin(other, 0)
        self.assertEqual(self.samples(sampler, SAMPLES + 10), SAMPLES + 10)
        self.assertEqual(self.reasons, [])
        builds.give_up(other)
        self.assertEqual((self.samples(sampler, 10), len(self.reasons)), (1, 1))
        self.assertFalse(sampler.is_due())

    def test_a_function_does_not_wait_for_ever(self) -> None:
        builds.begin(other := Function(), 0)
        self.assertEqual(self.samples(self.made(), 1000), SAMPLES + 1 + sampler._PATIENCE)
        self.assertEqual((len(self.reasons), builds.is_over(other)), (1, False))

    def test_kernels_that_cannot_be_compiled_leave_inputs_patched(self) -> None:
        self.is_built = False
        self.assertEqual(self.samples(self.made(), 100), SAMPLES + 2)
        self.assertEqual((self.choice, self.reasons, self.function.log.awaits_table), (Reason.NOT_COMPILED, [], False))

    def test_a_recording_that_fails_with_a_table_leaves_it_for_good(self) -> None:
        self.samples(self.made(), 100)
        route_rule.leave_table(self.function, 0, RuntimeError("of the {test}"))
        self.assertEqual(self.function.log.route, "by address: recording it with a table failed: of the {test}")
        self.assertEqual(table.taken_by_variants(self.function), frozenset())
        for sizes in (0, 1):
            self.assertIsNone(sampler_for(self.function, sizes, 0, self.log))

    def test_a_recording_that_cannot_use_the_table_says_so(self) -> None:
        self.samples(self.made(), 100)
        route_rule.recorded(self.function, 0, reads_table=False)
        self.assertEqual(self.function.log.route, "by address: a table is built, but this recording cannot use it")
        self.assertTrue(route_rule.may_use_table(self.function, 0))  # a recording elsewhere in the tree may

    def test_other_sizes_use_a_table_that_is_there(self) -> None:
        self.samples(self.made(), 100)
        route_rule.recorded(self.function, 1, reads_table=True)
        found = route_rule.choice_of(self.function, 1)
        assert found is not None
        self.assertEqual((found.reason, found.facts.kernels), (Reason.TABLE, 20))

    def test_nothing_is_told_of_a_table_that_was_asked_for(self) -> None:
        table.take(self.function, {0})
        route_rule.recorded(self.function, 0, reads_table=True)
        self.assertIsNone(self.function.log.route)

    def test_no_sample_is_taken_while_the_program_captures(self) -> None:
        sampler, self.is_capturing = self.made(), True
        self.samples(sampler, 2 * SAMPLES)
        self.assertIsNone(self.choice)
        self.is_capturing = False
        self.samples(sampler, SAMPLES)
        self.assertEqual(self.choice, Reason.TABLE_AWAITED)

    def test_missing_facts_leave_inputs_patched(self) -> None:
        sampler = self.made()
        self.assertTrue(sampler.can_choose(range(6), self.names))
        self.assertFalse(sampler.can_choose(range(3), self.names))
        self.kernels = self.kernels[5:]
        self.assertFalse(sampler.can_choose(range(6), self.names))
        with mock.patch.dict(table._readers, {self.function: {}}):
            self.assertIsNone(sampler_for(self.function, 0, 0, self.log))
        with mock.patch.object(torch.cuda, "current_stream", side_effect=RuntimeError("of the test")):
            with self.assertLogs("pygraph_trees.indirection", "WARNING") as logs:
                self.assertEqual(self.samples(sampler, 100), 1)
            self.assertIn("of the test", logs.output[0])

    def test_a_sampler_does_not_keep_its_function(self) -> None:
        sampler, gone = self.made(), weakref.ref(self.function)
        del self.function
        self.assertIsNone(gone())
        self.assertFalse(sampler.sample((), 1, 1, self.names) or sampler.can_choose(range(6), self.names))


if __name__ == "__main__":
    run_tests()
