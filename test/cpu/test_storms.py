"""Functions that warm up and record more than they replay: which sizes are graphed, and when recording stops."""

from __future__ import annotations

import itertools
import random
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
from bare_manager import bare_manager
from hypothesis import given
from hypothesis import strategies as st
from torch._inductor import cudagraph_trees
from torch.testing._internal.common_utils import TestCase, run_tests

from pygraph_trees.report.log import Count, GraphLog, RecordingLog, journal
from pygraph_trees.settings import Settings
from pygraph_trees.trees import choice, storms
from pygraph_trees.trees.dispatch import Way
from pygraph_trees.trees.function import FunctionModel
from pygraph_trees.trees.manager import Manager
from pygraph_trees.trees.storms import Sizes, why_stopped


class TestSizes(TestCase):
    def test_the_first_sizes_are_graphed_at_once(self):
        sizes = Sizes()
        found = [sizes.are_graphed((n,)) for n in range(2 * storms.FIRST_SIZES)]
        self.assertEqual(found, [True] * storms.FIRST_SIZES + [False] * storms.FIRST_SIZES)
        self.assertTrue(all(sizes.are_graphed((n,)) for n in range(storms.FIRST_SIZES)))

    def test_a_size_that_comes_again_is_graphed_later(self):
        sizes, count = Sizes(), storms.FIRST_SIZES + 4
        rounds = [[sizes.are_graphed((n,)) for n in range(count)] for _ in range(storms.COMES_AGAIN + 1)]
        self.assertEqual(
            [sum(found) for found in rounds], [storms.FIRST_SIZES] * (storms.COMES_AGAIN - 1) + [count] * 2
        )

    def test_memory_is_bounded(self):
        sizes = Sizes()
        for n in range(4 * storms.MOST_WAITING):
            sizes.are_graphed((n, n + 1))
        self.assertLessEqual(len(sizes._waiting), storms.MOST_WAITING)
        for n in range(storms.MOST_SIZES * 2):
            for _ in range(storms.COMES_AGAIN):
                sizes.are_graphed((-n,))
        self.assertEqual(len(sizes._graphed), storms.MOST_SIZES)

    @given(st.lists(st.integers(0, 40), max_size=400))
    def test_a_size_that_was_graphed_stays_graphed(self, drawn):
        sizes, graphed = Sizes(), set()
        for n in drawn:
            is_graphed = sizes.are_graphed((n,))
            self.assertTrue(is_graphed or n not in graphed)
            if is_graphed:
                graphed.add(n)

    def test_random_sizes_stay_within_the_limit(self):
        sizes, draw = Sizes(), random.Random(3)
        graphed = {n for n in (draw.randrange(3000) for _ in range(60_000)) if sizes.are_graphed((n,))}
        self.assertLessEqual(len(graphed), storms.MOST_SIZES)


class TestRecordings(TestCase):
    def logs(self, count, replays=0):
        logs = [RecordingLog(number=n, reason="of the test", counter=Count()) for n in range(count)]
        for _, recording in zip(range(replays), itertools.cycle(logs), strict=False):
            recording.counter.value += 1
        return logs

    def test_more_recordings_than_replays_stop(self):
        limit = storms.MOST_RECORDINGS
        for recordings, replays, stops in ((limit - 1, 0, False), (limit, limit, False), (limit, limit - 1, True)):
            self.assertEqual(why_stopped(self.logs(recordings, replays)) is not None, stops)
        self.assertExpectedInline(
            str(why_stopped(self.logs(16, 2))),
            """it was recorded 16 times for 2 replays, the last time because: of the test""",
        )

    def test_only_recordings_at_the_same_place_count(self):
        """A block that layers share is recorded once at each position of a training step."""
        nodes = [SimpleNamespace(log=log, children={}) for log in self.logs(3 * storms.MOST_RECORDINGS)]
        for node, following in itertools.pairwise(nodes):
            node.children[7] = [following]
        manager = bare_manager(roots={7: nodes[:1]})
        for node in (None, *nodes):
            manager.current_node = node
            model = SimpleNamespace(stop=mock.Mock())
            self.assertIsNone(manager._why_stopped(model, 7))
            model.stop.assert_not_called()
        manager.current_node = SimpleNamespace(children={7: nodes})
        self.assertRegex(manager._why_stopped(model, 7), "it was recorded 48 times for 0 replays")
        model.stop.assert_called_once()
        self.assertIsNone(manager._why_stopped(SimpleNamespace(stop=None), 7))  # it is always graphed


class TestFunctions(TestCase):
    """Functions that are chosen by measurement; numbers are doubled."""

    def model(self, selective="auto"):
        with journal.compiling(GraphLog("Net", "5/0", "inference", ())):
            model = FunctionModel.of(lambda inputs: [inputs[1] * 2], is_backward=False, is_inference=True)
        model.settings = Settings("off", "auto", selective)
        return model

    def limited(self, model, run):
        self.enterContext(mock.patch("torch._inductor.compile_fx.get_input_idxs_to_check", lambda *_: []))
        return choice.only_sizes_that_come_again(model, run, [3, torch.ones(2)], (), (), 0)

    def test_a_function_whose_sizes_always_change_runs_ungraphed(self):
        model, graphed = self.model(), []
        call = self.limited(model, lambda inputs: graphed.append(inputs[0]) or [inputs[1] * 2])
        for n in range(100):
            self.assertEqual(call([n, torch.ones(2)]), [torch.full((2,), 2.0)])
        self.assertEqual(graphed, list(range(storms.FIRST_SIZES)))
        self.assertEqual(model.log.ungraphed_reason, storms.OTHER_SIZES)

    def test_after_many_such_calls_others_take_the_shortest_way(self):
        """A size that is graphed ends that."""
        model = self.model()
        call = self.limited(model, lambda inputs: [inputs[1] * 2])
        for n in range(storms.FIRST_SIZES + storms.REFUSED - 1):
            call([n, torch.ones(2)])
            self.assertIsNone(model.dispatch.call)
        call([-1, torch.ones(2)])
        self.assertIs(model.dispatch.way, Way.UNGRAPHED)
        for n in (-2, 3):
            self.assertEqual(model.dispatch.call([n, torch.ones(2)]), [torch.full((2,), 2.0)])
        self.assertIs(model.dispatch.way, Way.REPLAYED)
        self.assertIsNone(model.dispatch.call)

    def test_always_graphs_all_sizes(self):
        run = mock.Mock()
        self.assertIs(self.limited(self.model("always"), run), run)

    def test_a_function_without_integers_is_left_alone(self):
        run = mock.Mock()
        self.assertIs(choice.only_sizes_that_come_again(self.model(), run, [torch.ones(2)], (), (), 0), run)

    def test_a_function_that_stops_runs_ungraphed_and_gives_its_recordings_back(self):
        model, manager = self.model(), mock.Mock(spec=Manager)
        with (
            mock.patch.object(choice, "CudaDevice", lambda device: SimpleNamespace()),
            mock.patch.object(cudagraph_trees, "get_manager", lambda *args, **kwargs: manager),
            mock.patch("torch._inductor.compile_fx.get_input_idxs_to_check", lambda *_: []),
        ):
            kept = choice.chooser((), (), 0)(model, lambda inputs: self.fail("graphed"))
            model.stop("of the test")
            self.assertIs(model.dispatch.way, Way.UNGRAPHED)
            self.assertEqual(model.dispatch.call([3, torch.ones(2)]), [torch.full((2,), 2.0)])
        manager.forget.assert_called_once_with(model, later=True)
        self.assertEqual(model.log.ungraphed_reason, "of the test")
        self.assertIsNotNone(kept)


if __name__ == "__main__":
    run_tests()
