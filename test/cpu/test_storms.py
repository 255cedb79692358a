"""Functions that warm up and record more often than they replay: which sizes are graphed, and when recording stops."""

import itertools
import random
import signal
from types import SimpleNamespace
from unittest import mock

import torch
from fake_trees import bare_manager
from test_trees import inference
from test_trial import if_aligned
from torch._inductor import config, cudagraph_trees
from torch.testing._internal.common_utils import TestCase, run_tests

from pygraph_trees.reasons import Reason
from pygraph_trees.report.log import Count, FunctionLog, RecordingLog
from pygraph_trees.selection.decision import Execution
from pygraph_trees.trees.functions.function import Aligned
from pygraph_trees.trees.hooks import choice
from pygraph_trees.trees.managers import calls, storms
from pygraph_trees.trees.managers.manager import Manager
from pygraph_trees.trees.managers.storms import Sizes, is_endless, why_stopped


class TestSizes(TestCase):
    def test_the_first_sizes_are_graphed_at_once_and_others_when_they_come_again(self):
        sizes, others = Sizes(), 4
        count = storms.FIRST_SIZES + others
        rounds = [[sizes.are_graphed((n,)) for n in range(count)] for _ in range(storms.COMES_AGAIN + 1)]
        first = [True] * storms.FIRST_SIZES + [False] * others
        self.assertEqual(rounds, [first] * (storms.COMES_AGAIN - 1) + [[True] * count] * 2)

    def test_memory_is_bounded(self):
        """Of more sizes than are remembered, none comes again. Another thread calls while one is dropped."""

        class Changing(dict):
            def __iter__(self):
                if next(changes):
                    raise RuntimeError("dictionary changed size during iteration")
                return super().__iter__()

        sizes, changes = Sizes(), itertools.cycle((True, False, True, True, False))
        sizes._waiting = Changing()
        for n in range(storms.FIRST_SIZES):
            sizes.are_graphed((-n,))
        for n in [*range(1, storms.MOST_WAITING + 2)] * (storms.COMES_AGAIN + 1):
            self.assertFalse(sizes.are_graphed((n,)))
        self.assertEqual(len(sizes._waiting), storms.MOST_WAITING)

    def test_random_sizes_stay_graphed_and_within_the_limit(self):
        for most in (40, 3000):
            sizes, graphed, draw = Sizes(), set(), random.Random(3)
            for n in (draw.randrange(most) for _ in range(60_000)):
                is_graphed = sizes.are_graphed((n,))
                self.assertTrue(is_graphed or n not in graphed)
                graphed |= {n} if is_graphed else set()
            self.assertEqual(len(graphed), min(most, storms.MOST_SIZES))


class TestPaths(TestCase):
    def recordings(self, count, replays):
        """Recordings of a function; the first one is replayed."""
        logs = [RecordingLog(number=n, reason="of the test", counter=Count(replays * (n == 0))) for n in range(count)]
        return [SimpleNamespace(log=log) for log in logs]

    def test_more_recordings_than_replays_stop(self):
        """On a path that never ends, for example because its outputs are kept, it takes more of them."""
        for most, place in ((storms.MOST_RECORDINGS, 0), (storms.MOST_ON_PATH, 1)):
            for count, replays, stops in ((most - 1, 0, False), (most, most, False), (most, most - 1, True)):
                places = [[], []]
                places[place] = self.recordings(count, replays)
                self.assertEqual(why_stopped(*places) is not None, stops, (count, replays))
        newest = [node.log for node in self.recordings(storms.MOST_ON_PATH, storms.MOST_ON_PATH - 1)]
        self.assertIsNotNone(why_stopped([], [], newest))  # each step takes another path
        self.assertIsNone(why_stopped([], [], newest[1:]))
        after_days = [*self.recordings(1, 10**6), *self.recordings(4 * storms.MOST_RECORDINGS, 2)]
        self.assertIsNotNone(why_stopped(after_days, []))
        self.assertIsNone(why_stopped(after_days[:-1], []))
        for recording in after_days[:-15]:  # an interrupt does not make a storm
            recording.log.was_interrupted = True
        self.assertIsNone(why_stopped(after_days, []))
        self.assertEqual(
            why_stopped(self.recordings(16, 2), ()),
            "it was recorded 16 times for 2 replays, the last time because: of the test",
        )

    def test_a_recording_of_an_interrupted_call_is_noted(self):
        for replays in (0, 3):
            (node,) = self.recordings(1, replays)
            with mock.patch.object(Manager, "_run_in_turn", lambda *_: signal.raise_signal(signal.SIGINT)):
                self.assertRaises(KeyboardInterrupt, bare_manager(current_node=node).run, [], 7)
            self.assertEqual(node.log.was_interrupted, replays == 0)

    def path(self, *alive):
        """A path with a recording for each value; the outputs of some are alive."""
        shared = {"wrapped_function": SimpleNamespace(id=7, model=mock.Mock()), "cuda_graphs_pool": (0, 7)}
        held = [lambda is_alive=is_alive: 7 if is_alive else None for is_alive in alive]
        nodes = [SimpleNamespace(outputs_weakrefs=[None, reference], **shared) for reference in held]
        nodes[-1]._path_from_root = nodes
        return nodes[-1]

    def test_a_path_of_forwards_without_a_backward_ends(self):
        most, long = storms.MOST_DEAD, storms.MOST_ON_ENDLESS
        dead, frozen = [False] * most, [False] * 48 + [True]  # layers without a backward come before a trained one
        for ends, alive, forwards, others in (
            # Outputs of the last call, which may consist of several graphs, may still have a backward.
            *((n >= most, dead[:n] + last, None, 0) for n in (0, most - 1, most) for last in ([True], [True] * 3)),
            # An earlier forward may have a backward.
            *((False, [place == n for n in range(20)] + [True], None, 0) for place in (0, 7, 15)),
            (False, frozen, [48], 0),
            (False, frozen, range(15), 0),
            (True, frozen, range(0, 48, 2), 0),
            # Forwards that run un-graphed count.
            (True, [*dead, True], [], 16),
            (True, [*dead, True], range(9), 7),
            (False, [*dead, True], [], 15),
            (False, [*dead[1:], True, True], [], 99),
            # If the first one is kept, the length of the path tells.
            (True, [True, *[False] * (long - 1)], None, 0),
            (False, [True, *[False] * long], None, 0),
            (False, [True] * (long // 2) + [False] * (long // 2), None, 0),
            (False, [True, *[False] * (long - 1)], range(long // 2), 0),
        ):
            nodes = self.path(*alive)._path_from_root
            found = is_endless(nodes, lambda node: forwards is None or nodes.index(node) in forwards, others=others)  # noqa: B023
            self.assertEqual(found, ends, (alive, forwards, others))

    def test_a_step_begins_although_a_backward_is_pending(self):
        endless, short, overwritten = (self.path(*[False] * dead, True) for dead in (20, 1, 20))
        overwritten.wrapped_function.model = None  # its outputs are not kept
        self.enterContext(mock.patch.object(calls, "keeps_outputs", lambda model: model is not None))
        self.enterContext(mock.patch.object(Manager, "user_invoked_mark_step", lambda _: False))
        for node, keeps, generation, begins in (
            (overwritten, True, 1, False),
            (endless, True, 1, True),
            (endless, False, 1, False),  # as upstream
            (endless, True, 0, False),  # within the same call of the program
            (short, True, 1, False),
            (None, True, 1, False),
        ):
            manager = bare_manager(current_node=node, current_gen=0, keeps_outputs=keeps)
            manager.running_forwards_with_pending_backwards = True
            manager.id_to_mode = {7: cudagraph_trees.CompilationMode.FORWARD}
            with mock.patch.object(Manager, "get_curr_generation", lambda _, found=generation: found):
                self.assertEqual(manager.can_start_new_generation(), begins)

    def test_the_end_of_a_path_and_the_move_of_its_outputs_go_by_one_answer(self):
        """Torch's own code, in any version, asks once; another thread begins a step in between."""

        def keep_outputs(manager):
            if manager.can_start_new_generation():
                moved.append("moved")
            manager.now = 1  # another thread begins a step

        replaced = {"get_curr_generation": lambda manager: manager.now, "user_invoked_mark_step": lambda _: True}
        replaced["_clone_current_path_live_user_visible_outputs"] = lambda _: None  # torch 2.14 and later
        manages = type("Manages", (Manager,), {"_keep_outputs": keep_outputs, **replaced})
        for generation, expected in ((1, ["moved", "ended"]), (0, [])):
            moved, node = [], cudagraph_trees.CUDAGraphNode.__new__(cudagraph_trees.CUDAGraphNode)
            node._parent, node.all_outputs_are_dead = lambda: None, lambda: False
            node.clear_path_state = lambda moved=moved: moved.append("ended")
            manager = bare_manager(manages, now=generation, current_node=node, current_gen=0, keeps_outputs=True)
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
            manager = bare_manager(ids_to_funcs={7: function}, id_to_mode={7: name})
            manager.running_forwards_with_pending_backwards = pending
            self.assertTrue(manager.take_turn(other))
            self.assertEqual(manager.run([1], 7), [2])
            self.assertEqual(manager.running_forwards_with_pending_backwards, expected)
            graphed = manager.turns - manager.asides
            manager.note_ungraphed([1], is_forward=False)  # it does not count as a graphed call
            self.assertEqual(manager.turns - manager.asides, graphed)
            manager.end_turn(other)


class TestFunctions(TestCase):
    """Functions that are chosen by measurement, and double their input."""

    def setUp(self):
        super().setUp()
        self.enterContext(mock.patch("torch._inductor.compile_fx.get_input_idxs_to_check", lambda *_: []))
        self.model, self.graphed = inference(self.doubled, placement="off", indirection="auto", selective="auto"), []
        self.aligned = Aligned(self.model, (), ())
        self.limited = choice.only_sizes_that_come_again(self.model, self.run_graphed, [3, None], self.aligned, 0)

    def doubled(self, inputs):
        return [inputs[1] * 2]

    def run_graphed(self, inputs):
        self.graphed.append(inputs[0])
        return self.doubled(inputs)

    def check(self, call, number):
        self.assertEqual(call([number, torch.ones(2)]), [torch.full((2,), 2.0)])

    def test_a_function_whose_sizes_always_change_runs_ungraphed(self):
        """After many such calls, others take the shortest way, until one has a size that is graphed."""
        for n in range(storms.FIRST_SIZES + storms.REFUSED):
            self.assertIsNone(self.model.dispatch.call)
            self.check(self.limited, n)
        self.assertEqual(self.graphed, list(range(storms.FIRST_SIZES)))
        self.assertIs(self.model.log.ungraphed_reason.reason, Reason.OTHER_SIZES)
        self.assertFalse(self.model.dispatch.is_graphed)
        self.check(self.model.dispatch.call, -2)
        self.assertIsNone(self.model.dispatch.call([3, torch.ones(2)]))
        self.assertIsNone(self.model.dispatch.call)
        self.assertIsNone(self.model.dispatch.call)

    @config.patch({"triton.cudagraph_capture_sizes": (3,)})
    def test_sizes_that_the_program_names_are_not_limited(self):
        run = choice.only_sizes_that_come_again(self.model, self.run_graphed, [3, None], self.aligned, 0)
        self.assertEqual(run, self.run_graphed)

    def test_sizes_that_are_replayed_in_between_go_on_being_replayed_and_measured(self):
        """C++ replays them, unseen in Python. Not each call counts the replays of all recordings."""
        replays, self.model.trial = itertools.count(1), mock.Mock()
        with mock.patch.object(FunctionLog, "replays", mock.PropertyMock(side_effect=replays.__next__)) as counted:
            for n in range(storms.FIRST_SIZES + 4 * storms.REFUSED):
                self.check(self.limited, n)
        self.assertIsNone(self.model.dispatch.call)
        self.model.trial.give_up.assert_not_called()
        self.assertLessEqual(counted.call_count, 4)

    def test_the_first_call_decides_which_inputs_must_be_aligned(self):
        """Later calls, whose sizes are not graphed, may get misaligned inputs."""
        seen, base = [], torch.zeros(9)
        self.model.model = lambda inputs: seen.append(inputs[1].data_ptr() % 16)
        with mock.patch("torch._inductor.compile_fx.get_input_idxs_to_check", if_aligned):
            for n in range(2 * storms.FIRST_SIZES):
                self.limited([n, base[n > 0 :]])
        self.assertEqual(seen, [0] * storms.FIRST_SIZES)

    def test_a_function_that_stops_runs_ungraphed_and_gives_its_recordings_back(self):
        model, manager = self.model, mock.Mock(spec=Manager)
        with (
            mock.patch.object(choice, "CudaDevice", lambda device: SimpleNamespace()),
            mock.patch.object(cudagraph_trees, "get_manager", lambda *args, **kwargs: manager),
        ):
            kept = choice.chooser(0)(model, lambda inputs: self.fail("graphed"), self.aligned)
            model.stop("of the test")
            self.assertFalse(model.dispatch.is_graphed)
            self.check(model.dispatch.call, 3)
            self.assertTrue(model.trial.is_over)  # it has no other function
            self.check(model.dispatch.call, 3)
            kept.environment.ended(Execution.GRAPHED)
            self.assertFalse(model.dispatch.is_graphed)
        manager.forget.assert_called_once_with(model, later=True)
        self.assertEqual(model.log.ungraphed_reason, "of the test")


if __name__ == "__main__":
    run_tests()
