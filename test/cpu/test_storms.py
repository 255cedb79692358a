"""Functions that warm up and record more often than they replay: which sizes are graphed, and when recording stops."""

from __future__ import annotations

import itertools
import random
from types import SimpleNamespace
from unittest import mock

import torch
from bare_manager import bare_manager
from test_trial import if_aligned
from torch._inductor import cudagraph_trees
from torch.testing._internal.common_utils import TestCase, run_tests

from pygraph_trees.report.log import Count, GraphLog, RecordingLog, journal
from pygraph_trees.selection.decision import Execution
from pygraph_trees.settings import Settings
from pygraph_trees.trees.functions.aligned import Aligned
from pygraph_trees.trees.functions.dispatch import Way
from pygraph_trees.trees.functions.function import FunctionModel
from pygraph_trees.trees.hooks import choice
from pygraph_trees.trees.managers import steps, storms
from pygraph_trees.trees.managers.manager import Manager
from pygraph_trees.trees.managers.storms import Sizes, is_endless, why_stopped


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
        """Of more sizes than are remembered, none comes again."""
        sizes = Sizes()
        for n in range(storms.FIRST_SIZES):
            sizes.are_graphed((-n,))
        for n in [*range(1, storms.MOST_WAITING + 2)] * (storms.COMES_AGAIN + 1):
            self.assertFalse(sizes.are_graphed((n,)))

    def test_another_thread_calls_while_one_is_dropped(self):
        class Changing(dict):
            def __iter__(self):
                if next(changes):
                    raise RuntimeError("dictionary changed size during iteration")
                return super().__iter__()

        sizes, changes = Sizes(), itertools.cycle((True, False, True, True, False))
        sizes._waiting = Changing()
        for n in range(storms.FIRST_SIZES + 2 * storms.MOST_WAITING):
            sizes.are_graphed((n,))
        self.assertEqual(len(sizes._waiting), storms.MOST_WAITING)

    def test_random_sizes_stay_graphed_and_within_the_limit(self):
        for most in (40, 3000):
            sizes, graphed, draw = Sizes(), set(), random.Random(3)
            for n in (draw.randrange(most) for _ in range(60_000)):
                is_graphed = sizes.are_graphed((n,))
                self.assertTrue(is_graphed or n not in graphed)
                graphed |= {n} if is_graphed else set()
            self.assertEqual(len(graphed), min(most, storms.MOST_SIZES))


class TestRecordings(TestCase):
    def nodes(self, count, replays):
        """Recordings of a function that are replayed one after the other."""
        logs = [RecordingLog(number=n, reason="of the test", counter=Count()) for n in range(count)]
        for recording in itertools.islice(itertools.cycle(logs), replays):
            recording.counter.value += 1
        return [SimpleNamespace(log=log) for log in logs]

    def test_more_recordings_than_replays_stop(self):
        """On a path that never ends, for example because its outputs are kept, it takes more of them."""
        for most, place in ((storms.MOST_RECORDINGS, 0), (storms.MOST_ON_PATH, 1)):
            for count, replays, stops in ((most - 1, 0, False), (most, most, False), (most, most - 1, True)):
                places = [[], []]
                places[place] = self.nodes(count, replays)
                self.assertEqual(why_stopped(*places) is not None, stops, (count, replays))
        self.assertEqual(
            why_stopped(self.nodes(16, 2), ()),
            "it was recorded 16 times for 2 replays, the last time because: of the test",
        )


class TestPaths(TestCase):
    def path(self, *alive):
        """A path with a recording for each value; the outputs of some are alive."""
        function = SimpleNamespace(id=7, model=mock.Mock())
        nodes = [
            SimpleNamespace(
                outputs_weakrefs=[None, lambda is_alive=is_alive: 7 if is_alive else None],
                wrapped_function=function,
                cuda_graphs_pool=(0, 7),
            )
            for is_alive in alive
        ]
        nodes[-1]._path_from_root = nodes
        return nodes[-1]

    def test_a_path_of_forwards_without_a_backward_ends(self):
        most = storms.MOST_DEAD
        frozen = [False] * 48 + [True]  # layers without a backward come before a layer that is trained
        for ends, alive, forwards, others in (
            # Outputs of the last call, which may consist of several graphs, may still have a backward.
            *(
                (dead >= most, [False] * dead + [True] * last, None, 0)
                for dead in (0, most - 1, most)
                for last in (1, 3)
            ),
            # An earlier forward may have a backward.
            *((False, [place == n for n in range(20)] + [True], None, 0) for place in (0, 7, 15)),
            (False, frozen, [48], 0),
            (False, frozen, range(15), 0),
            (True, frozen, range(0, 48, 2), 0),
            # Forwards that run un-graphed count.
            (True, [False] * 16 + [True], [], 16),
            (True, [False] * 16 + [True], range(9), 7),
            (False, [False] * 16 + [True], [], 15),
            (False, [False] * 15 + [True] * 2, [], 99),
        ):
            nodes = self.path(*alive)._path_from_root
            found = is_endless(nodes, lambda node: forwards is None or nodes.index(node) in forwards, others=others)  # noqa: B023
            self.assertEqual(found, ends, (alive, forwards, others))

    def test_a_step_begins_although_a_backward_is_pending(self):
        endless, short, overwritten = (self.path(*[False] * dead, True) for dead in (20, 1, 20))
        overwritten.wrapped_function.model = SimpleNamespace()  # its outputs are not kept
        self.enterContext(mock.patch.object(steps, "keeps_outputs", lambda model: isinstance(model, mock.Mock)))
        for node, keeps, generation, begins in (
            (overwritten, True, 1, False),
            (endless, True, 1, True),
            (endless, False, 1, False),  # as upstream
            (endless, True, 0, False),  # within the same call of the program
            (short, True, 1, False),
            (None, True, 1, False),
        ):
            manager = bare_manager(
                current_node=node, current_gen=0, keeps_outputs=keeps, running_forwards_with_pending_backwards=True
            )
            manager.id_to_mode = {7: cudagraph_trees.CompilationMode.FORWARD}
            with (
                mock.patch.object(manager, "get_curr_generation", lambda found=generation: found),
                mock.patch.object(manager, "user_invoked_mark_step", lambda: False),
            ):
                self.assertEqual(manager.can_start_new_generation(), begins)

    def test_the_end_of_a_path_and_the_move_of_its_outputs_go_by_one_answer(self):
        """Torch's own code, in any version, asks once; another thread begins a step in between."""
        moved = []

        class Path(cudagraph_trees.CUDAGraphNode):
            def __init__(self):
                pass

            _parent = staticmethod(lambda: None)

            def all_outputs_are_dead(self):
                return False

            def clear_path_state(self):
                moved.append("ended")

        class Manages(Manager):
            def get_curr_generation(self):
                return now[0]

            def user_invoked_mark_step(self):
                return True

            def _clone_current_path_live_user_visible_outputs(self):
                pass  # torch 2.14 and later

            def _keep_outputs(self):
                if self.can_start_new_generation():
                    moved.append("moved")
                now[0] = 1  # another thread begins a step

        for generation, expected in ((1, ["moved", "ended"]), (0, [])):
            moved.clear()
            now = [generation]
            manager = bare_manager(Manages, current_node=Path(), current_gen=0, keeps_outputs=True)
            manager.path_state = cudagraph_trees.ExecutionState.EXECUTION
            manager.try_end_curr_execution()
            self.assertEqual(moved, expected)

    def test_a_backward_beside_another_call_is_no_longer_awaited(self):
        mode = cudagraph_trees.CompilationMode
        for name, pending, expected in (
            (mode.BACKWARD, True, False),
            (mode.FORWARD, False, True),
            (mode.INFERENCE, True, True),
            (mode.INFERENCE, False, False),
        ):
            function, other = SimpleNamespace(model=lambda inputs: [inputs[0] + 1]), ["of another call"]
            manager = bare_manager(
                ids_to_funcs={7: function}, id_to_mode={7: name}, running_forwards_with_pending_backwards=pending
            )
            self.assertTrue(manager.take_turn(other))
            self.assertEqual(manager.run([1], 7), [2])
            self.assertEqual(manager.running_forwards_with_pending_backwards, expected)
            manager.end_turn(other)


class TestFunctions(TestCase):
    """Functions that are chosen by measurement, and double their input."""

    def model(self, selective="auto"):
        with journal.compiling(GraphLog("Net", "5/0", "inference", ())):
            model = FunctionModel.of(lambda inputs: [inputs[1] * 2], is_backward=False, is_inference=True)
        model.settings = Settings("off", "auto", selective)
        return model

    def limited(self, model, run):
        self.enterContext(mock.patch("torch._inductor.compile_fx.get_input_idxs_to_check", lambda *_: []))
        return choice.only_sizes_that_come_again(model, run, [3, torch.ones(2)], Aligned(model, (), ()), 0)

    def test_a_function_whose_sizes_always_change_runs_ungraphed(self):
        model, graphed = self.model(), []
        call = self.limited(model, lambda inputs: graphed.append(inputs[0]) or [inputs[1] * 2])
        for n in range(100):
            self.assertEqual(call([n, torch.ones(2)]), [torch.full((2,), 2.0)])
        self.assertEqual(graphed, list(range(storms.FIRST_SIZES)))
        self.assertEqual(model.log.ungraphed_reason, storms.OTHER_SIZES)

    def test_after_many_such_calls_others_take_the_shortest_way(self):
        """A call with a size that is graphed ends this."""
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

    def test_sizes_that_are_replayed_in_between_go_on_being_replayed_and_measured(self):
        """C++ replays them, so their calls are not seen in Python."""
        model, recording = self.model(), RecordingLog()
        model.trial = mock.Mock()
        call = self.limited(model, lambda inputs: [inputs[1] * 2])
        for n in range(storms.FIRST_SIZES + 3 * storms.REFUSED):
            call([n, torch.ones(2)])
            model.log.recordings[:] = [recording]
            recording.counter.value += 1
        self.assertIs(model.dispatch.way, Way.REPLAYED)
        self.assertIsNone(model.dispatch.call)
        model.trial.give_up.assert_not_called()

    def test_the_first_call_decides_which_inputs_must_be_aligned(self):
        """Later calls, whose sizes are not graphed, may get misaligned inputs."""
        model, seen = self.model(), []
        model.model = lambda inputs: seen.append(inputs[1].data_ptr() % 16) or [inputs[1]]
        base = torch.zeros(9)
        call = self.limited(model, lambda inputs: [inputs.pop()])
        with mock.patch("torch._inductor.compile_fx.get_input_idxs_to_check", if_aligned):
            for n in range(2 * storms.FIRST_SIZES):
                call([n, base[n > 0 :]])
        self.assertEqual(seen, [0] * storms.FIRST_SIZES)

    def test_a_function_that_stops_runs_ungraphed_and_gives_its_recordings_back(self):
        model, manager = self.model(), mock.Mock(spec=Manager)
        with (
            mock.patch.object(choice, "CudaDevice", lambda device: SimpleNamespace()),
            mock.patch.object(cudagraph_trees, "get_manager", lambda *args, **kwargs: manager),
            mock.patch("torch._inductor.compile_fx.get_input_idxs_to_check", lambda *_: []),
        ):
            kept = choice.chooser(0)(model, lambda inputs: self.fail("graphed"), Aligned(model, (), ()))
            model.stop("of the test")
            self.assertIs(model.dispatch.way, Way.UNGRAPHED)
            self.assertEqual(model.dispatch.call([3, torch.ones(2)]), [torch.full((2,), 2.0)])
            self.assertTrue(model.trial.is_over)  # it has no other function
            self.assertEqual(model.dispatch.call([3, torch.ones(2)]), [torch.full((2,), 2.0)])
            kept.environment.ended(Execution.GRAPHED)
            self.assertIs(model.dispatch.way, Way.UNGRAPHED)
        manager.forget.assert_called_once_with(model, later=True)
        self.assertEqual(model.log.ungraphed_reason, "of the test")
        self.assertIsNotNone(kept)


if __name__ == "__main__":
    run_tests()
