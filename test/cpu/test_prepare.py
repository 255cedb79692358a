"""Programs that are prepared for traffic: afterwards, calls of their sizes record, try and build nothing."""

import itertools
import json
import weakref
from types import SimpleNamespace
from unittest import mock

import torch
from fake_trees import replay_with, replaying
from test_trees import inference
from test_trial import HEAVY, TrialTestCase
from torch.testing._internal.common_utils import TestCase, run_tests

import pygraph_trees
from pygraph_trees.reasons import Reason
from pygraph_trees.report.log import FunctionLog, RecordingLog, journal
from pygraph_trees.report.summary import clear
from pygraph_trees.serving import prepare as preparing
from pygraph_trees.trees.functions.function import Aligned, entered
from pygraph_trees.trees.hooks import choice
from pygraph_trees.trees.managers import storms
from pygraph_trees.trees.pools import program_pools

TRAFFIC = 60  # calls of each size


class TestTrials(TrialTestCase):
    def setUp(self):
        super().setUp()
        clear()

    def prepared(self, *functions):
        def step(number):
            self.steps(1, *functions)
            return number

        for function in functions:
            journal.add_function(function.log)
        found = pygraph_trees.prepare(step, [(1,), lambda: {"number": 2}])
        before = [function.log.happened for function in functions]
        for _ in range(TRAFFIC):
            step(1)
        self.assertEqual([function.log.happened for function in functions], before)
        self.assertTrue(found.settled)
        return found.sizes

    def test_no_recording_and_no_trial_comes_after_it(self):
        """Whatever is decided, and if other functions of a step wait for their turn to be measured."""
        functions = [self.one()[1], self.one(**HEAVY)[1], *self.pair()[1:]]
        first, second = self.prepared(*functions)
        self.assertEqual([len(f.log.recordings) for f in functions], [1, 1, 1, 1])
        self.assertEqual((first.recordings, second.recordings, second.replays), (4, 0, 3))
        self.assertEqual((first.ungraphed, second.ungraphed), ((str(Reason.FASTER()),),) * 2)
        self.assertGreater(first.calls, 3 * 2 * 5)  # three measured trials, one after the other

    def test_a_function_that_waits_for_its_turn_is_decided_unless_it_leaves_its_trial(self):
        for leaves in (False, True):
            trial, function = self.one()
            trial._turn.take(holder := self.trial())  # which is alive at the end, too
            for _ in range(3):
                function(0)
            self.assertTrue(function.log.is_tried)
            if leaves:
                trial.leave(function.member)
            calls = [size.calls for size in self.prepared(function)]
            # After 200 requests, the holder loses the turn. A function that has left is not waited for.
            self.assertTrue(calls == [4, 4] if leaves else calls[0] > 190 and trial.is_over)
            self.assertFalse(holder.is_over)


class TestPrepare(TestCase):
    def setUp(self):
        super().setUp()
        clear()
        self.log = FunctionLog("f", "0/0", "inference", 1, {})
        journal.add_function(self.log)

    def record(self):
        self.log.recordings.append(RecordingLog())

    def replay(self, *_):
        self.log.recordings[-1].counter.value += 1

    def test_lanes_are_waited_for_if_the_size_replays_what_is_tried(self):
        for _ in range(3):
            self.record()
        first, second, unused = self.log.recordings
        first.is_tried = unused.is_tried = True

        def fn():
            for recording in (first, second):
                recording.counter.value += 1
            first.is_tried = first.replays < 30

        (found,) = pygraph_trees.prepare(fn, [()]).sizes
        self.assertTrue(found.settled and not first.is_tried, found)

    def test_a_size_that_changes_what_another_has_made_is_followed_by_that_one(self):
        made = {}

        def fn(size):
            again = size == 1 and 2 in made
            if made.get(size) is not again:
                made[size] = again
                self.record()
            self.replay()

        found = pygraph_trees.prepare(fn, [1, 2])
        self.assertEqual((len(self.log.recordings), [s.recordings for s in found.sizes]), (3, [2, 1]))
        self.assertTrue(found.settled)
        for size in (1, 2) * TRAFFIC:
            fn(size)
        self.assertEqual(len(self.log.recordings), 3)

    def test_what_never_settles_ends_at_the_limit_and_is_named(self):
        found = pygraph_trees.prepare(lambda x: self.record(), [(torch.ones(2, 3),)], most_calls=9)
        self.assertEqual((found.settled, found.sizes[0].calls), (False, 9))
        self.assertIn("[2, 3]: still changes after 9 calls", str(found))
        self.assertEqual(json.loads(found.to_json())["sizes"][0]["recordings"], 9)
        self.assertIn("still changes", found.to_html())

    def test_arguments_and_outputs_live_as_in_a_loop(self):
        """A callable's tensors have other addresses than those of the call before."""
        addresses, outputs, alive = [], [], []

        def fn(x):
            addresses.append(x.data_ptr())
            alive.append(sum(output() is not None for output in outputs))
            outputs.append(weakref.ref(made := torch.ones(2)))
            return made

        pygraph_trees.prepare(fn, [lambda: torch.ones(100_000)])
        self.assertEqual(alive, [0, 1, 1, 1])
        self.assertTrue(all(a != b for a, b in itertools.pairwise(addresses)))

    def test_routes_are_chosen_and_tables_built_if_inputs_move(self):
        self.record()
        self.log.is_choosing, moves = True, True

        def fn():
            self.replay()
            self.log.recordings[-1].sets.value += moves

        with mock.patch.object(preparing.builds, "finish") as finish:
            (found,) = pygraph_trees.prepare(fn, [()]).sizes
            self.assertEqual(found.calls, 2 * preparing.REPLAYS)
            finish.assert_not_called()
            self.log.awaits_table, moves = True, False
            (found,) = pygraph_trees.prepare(fn, [()]).sizes
            self.assertEqual(found.calls, 4)
            finish.assert_called_with(preparing._BUILD_S)

    def test_memory_is_counted_for_each_size(self):
        manager = SimpleNamespace(bytes=0, own=0, pool=SimpleNamespace(nbytes=lambda: manager.bytes))
        manager.output_policy = SimpleNamespace(held_bytes=lambda _: manager.own)

        def fn(nbytes):
            manager.bytes = max(manager.bytes, nbytes)
            manager.own = max(manager.own, nbytes // 10)

        with mock.patch.object(preparing.pools, "managers", lambda: [manager]):
            found = pygraph_trees.prepare(fn, [5_000_000, 7_000_000])
        facts = [(s.pool_bytes, s.own_bytes) for s in found.sizes]
        self.assertEqual(facts, [(5_000_000, 500_000), (2_000_000, 200_000)])
        self.assertIn("5.0 MB  500 kB", str(found))


class TestSizes(TestCase):
    """Functions with dynamic shapes, for which only some sizes have graphs."""

    def setUp(self):
        super().setUp()
        self.enterContext(mock.patch("torch._inductor.compile_fx.get_input_idxs_to_check", lambda *_: []))
        self.model = inference(lambda inputs: ["un-graphed"], placement="off", indirection="auto", selective="auto")
        aligned = Aligned(self.model, (), ())
        limited = choice.only_sizes_that_come_again(self.model, lambda inputs: ["graphed"], [3], aligned, 0)
        self.call = entered(self.model, limited, aligned)

    def ways(self, numbers):
        return [self.call([number])[0] for number in numbers]

    def test_all_sizes_that_are_prepared_are_graphed_at_once(self):
        seen = []
        pygraph_trees.prepare(lambda n: seen.append((n, *self.call([n]))), range(storms.MOST_SIZES + 1))
        graphed = ["graphed"] * storms.MOST_SIZES
        self.assertEqual({n for n, way in seen if way != "graphed"}, {storms.MOST_SIZES})
        self.assertEqual(self.ways(range(storms.MOST_SIZES + 2)), [*graphed, "un-graphed", "un-graphed"])

    def test_ungraphed_sizes_keep_the_fast_entry(self):
        """A graphed size is replayed by C++ at its next call, however many others were un-graphed before."""
        first = range(storms.FIRST_SIZES)
        self.assertEqual(set(self.ways(first)), {"graphed"})
        for _ in range(2):
            self.assertEqual(set(self.ways(range(100, 100 + 2 * storms.REFUSED))), {"un-graphed"})
            with mock.patch.object(program_pools, "are_used", lambda: self.fail("asked")):  # nothing that takes time
                self.assertEqual(self.ways([99]), ["un-graphed"])
            if fast := preparing.status() == "yes":
                known = replaying(lambda inputs, function_id: ["in C++"] if inputs[0] in first else None)
                replay_with(self.model.dispatch, known, 7)
            self.assertEqual(self.ways([3, 4]), ["in C++" if fast else "graphed"] * 2)


if __name__ == "__main__":
    run_tests()
