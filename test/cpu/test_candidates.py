"""The recording that is replayed if a function has several."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import itertools
import sys
import unittest
import weakref
from types import SimpleNamespace
from unittest import mock

from bare_manager import SKIPPED, bare_manager
from fake_trees import Graph, Plain, liveness_check, some
from torch._inductor import cudagraph_trees
from torch.testing._internal.common_utils import TestCase, run_tests

from pygraph_trees.native import binding
from pygraph_trees.trees.functions import fast_path
from pygraph_trees.trees.functions.function import FunctionModel
from pygraph_trees.trees.managers import candidates as candidates_module
from pygraph_trees.trees.managers.steps import Upstream
from pygraph_trees.trees.recordings.recording import Recording

MODE, EXECUTION = cudagraph_trees.CompilationMode, cudagraph_trees.ExecutionState.EXECUTION


class Reference:
    """Torch's weak reference to an output, which is alive while anything besides its recording holds it."""

    def __init__(self, outputs, index):
        self.outputs, self.index, self.is_held = outputs, index, False

    def __call__(self):
        is_alive = self.is_held or sys.getrefcount(self.outputs[self.index]) > 2
        return self.outputs[self.index] if is_alive else None

    def data_ptr(self):
        return self.outputs[self.index].data_ptr()


class Trees:
    """A manager of functions whose recordings check and replay as usual, but whose graphs do nothing."""

    def __init__(self):
        self.roots, self.wrapped, self.replayed = {}, {}, []
        self.manager = bare_manager(roots=self.roots, warmed_up_functions=self.wrapped, ids_to_funcs=self.wrapped)

    def function(self):
        """A function's number, and its entry."""
        model = FunctionModel.of(lambda inputs: inputs, is_backward=False, is_inference=True)
        model.settings = dataclasses.replace(model.settings, indirection="auto")
        model.dispatch.add(of_integers=False)
        number = len(self.wrapped)
        self.wrapped[number] = SimpleNamespace(id=number, model=model, mutated_input_idxs=())
        model.dispatch.may_be_replayed_by(self.manager, number)
        return number, fast_path.entry(model.dispatch)

    def recording(self, number, parent=None, *, static=(), outputs=1, dead=()):
        """Adds a recording of a function after ``parent``; ``dead``: the outputs on the path that must be dead."""
        node = Recording.__new__(Recording)
        cached = some(outputs)
        references = [Reference(cached, index) for index in range(outputs)]
        path = [*([] if parent is None else parent.path_weakrefs), references]
        replayed = self.replayed
        own = {
            "wrapped_function": self.wrapped[number],
            "id": object(),
            "children": {},
            "_parent": None if parent is None else weakref.ref(parent),
            "cuda_graphs_pool": (0, id(self)),
            "rerecord_if_static_inputs_change": True,
            "tensor_static_input_idxs": range(len(static)),
            "static_input_idxs": range(len(static)),
            "static_input_data_ptrs": [tensor.data_ptr() for tensor in static],
            "cudagraph_managed_idxs": [],
            "expected_dead_indices_before_graph": list(dead),
            "expected_dead_indices_after_graph": [],
            "outputs_metadata": [{"data_ptr": tensor.untyped_storage().data_ptr()} for tensor in cached],
            "static_output_tensors": [None] * outputs,
            "cached_tensor_outputs": cached,
            "outputs_weakrefs": references,
            "user_visible_output_idxs": (),
            "output_storage_alias": [cudagraph_trees.UnaliasedStorage] * outputs,
            "tensor_weakrefs": [None] * outputs,
            "path_weakrefs": path,
            "live_indices_after_graph": [(d, i) for d, held in enumerate(path) for i in range(len(held))],
            "graph": Graph(launches=0),
            "log": Plain(counter=binding.new_counter()),
            "has_fast_path": True,
        }
        for name, value in (own | liveness_check()).items():
            setattr(node, name, value)
        node._prepare_checks()
        node.native = node._native(in_python=False)
        name = id(node)
        node.graph.at_launch = lambda: replayed.append(name)
        (self.roots if parent is None else parent.children).setdefault(number, []).append(node)
        return node

    def skips(self, number, place, skipped=True):
        """Upstream has decided whether it graphs the function after a recording, or at the roots (None)."""
        vars(self.manager)[SKIPPED][place if place is None else place.id][number] = skipped

    def reset(self):
        """Drops all recordings, as upstream does when it resets its trees."""
        self.roots.clear()
        self.manager._candidates.clear()
        self.manager.current_node = None


@unittest.skipIf(binding.extension is None, "not built for this torch")
class TestCandidates(TestCase):
    def setUp(self):
        super().setUp()
        self.enterContext(mock.patch.object(cudagraph_trees.MarkStepBox, "mark_step_counter", -1))
        self.trees = Trees()
        self.steps = itertools.count(2)

    def step(self):
        cudagraph_trees.MarkStepBox.mark_step_counter = -next(self.steps)

    def check(self, call, inputs, node):
        """Asserts that ``node`` is replayed."""
        given, manager = list(inputs), self.trees.manager
        outputs = call(given)
        self.assertEqual([id(one) for one in outputs], [id(one) for one in node.cached_tensor_outputs])
        self.assertEqual((given, self.trees.replayed.pop(), self.trees.replayed), ([], id(node), []))
        self.assertIs(manager.current_node, node)
        self.assertEqual((manager.path_state, manager.mode, manager.compile_id), (EXECUTION, MODE.INFERENCE, "3/1"))
        self.assertEqual(manager.current_gen, manager.get_curr_generation())

    def check_none(self, call, inputs):
        given, node = list(inputs), self.trees.manager.current_node
        self.assertIsNone(call(given))
        self.assertEqual([id(one) for one in given], [id(one) for one in inputs])
        self.assertEqual(self.trees.replayed, [])
        self.assertIs(self.trees.manager.current_node, node)

    def replayed(self, change):
        """Whether a function's only recording is replayed when a step begins, after a change at its last position."""
        self.trees = Trees()
        number, call = self.trees.function()
        node = self.trees.recording(number)
        self.step()
        self.check(call, [], node)
        change(self.trees, number, node)
        self.trees.manager._candidates.clear()
        self.step()
        outputs = call([])
        self.assertEqual(self.trees.replayed, [id(node)] * (outputs is not None))
        return outputs is not None

    def test_calls_that_are_left_to_upstream(self):
        """Upstream gave up there after too many recordings, or because of an input; or it must warm up or record."""
        states = cudagraph_trees.ExecutionState

        def never_recorded(trees, number, node):
            trees.wrapped[number].model.dispatch.may_be_replayed_by(trees.manager, number + 1)

        def too_often(trees, number, node):
            trees.manager.exceed_rerecord_limit = lambda node_id, function_id: node_id is None

        def own_memory_from_now_on(trees, number, node):
            trees.manager.output_policy, trees.manager.current_node = Plain(changes_next=True), None

        def own_memory_once_the_path_ends(trees, number, node):
            policy, end = Plain(changes_next=False), trees.manager.try_end_curr_execution
            trees.manager.output_policy = policy
            trees.manager.try_end_curr_execution = lambda: (end(), setattr(policy, "changes_next", True))

        changes = {
            "it was never recorded": never_recorded,
            "another function is warmed up": lambda trees, *_: setattr(trees.manager, "path_state", states.WARMUP),
            "another function is recorded": lambda trees, *_: setattr(trees.manager, "path_state", states.RECORDING),
            "it is to be warmed up again": lambda trees, *_: setattr(trees.manager, "warmed_up_functions", set()),
            "the manager is shut down": lambda trees, *_: setattr(trees.manager, "graph", None),
            "it is not graphed after the node": lambda trees, number, node: trees.skips(number, node),
            "it is not graphed at the roots": lambda trees, number, _: trees.skips(number, None),
            "it was recorded too often": too_often,
            "outputs are given own memory": own_memory_from_now_on,
            "outputs are found that are given own memory": own_memory_once_the_path_ends,
            "upstream's own recording is asked first": lambda trees, number, _: trees.roots[number].insert(0, object()),
            "only upstream can check it": lambda trees, number, node: setattr(node, "native", None),
        }
        for what, change in changes.items():
            with self.subTest(what):
                self.assertFalse(self.replayed(change))
        self.assertTrue(self.replayed(lambda trees, number, _: trees.roots[number].append(object())))

    def test_a_function_that_mutates_inputs_asks_first_whether_it_may(self):
        """Upstream's decision after the last recording does not matter if each step ends the path."""
        self.enterContext(mock.patch("torch.cuda.is_current_stream_capturing", lambda: False))
        for after, at_roots, keeps, graphs in (
            (None, None, False, False),
            (True, None, False, False),
            (False, None, False, False),
            (False, True, False, False),
            (False, False, False, True),
            (None, False, False, False),
            (None, False, True, True),
        ):

            def change(trees, number, node, keeps=keeps, decided=((True, after), (False, at_roots))):
                trees.wrapped[number].mutated_input_idxs = (0,)
                trees.manager.keeps_outputs = keeps
                for is_after, skipped in decided:
                    if skipped is not None:
                        trees.skips(number, node if is_after else None, skipped)

            with self.subTest(after=after, at_roots=at_roots, keeps=keeps):
                self.assertEqual(self.replayed(change), graphs)

    @contextlib.contextmanager
    def looked_for(self, count):
        """Asserts how often candidates are searched."""
        search = self.trees.manager._find
        found = mock.Mock(side_effect=search)
        self.trees.manager._find = found
        yield
        self.trees.manager._find = search
        self.assertEqual(found.call_count, count)

    def test_functions_that_follow_each_other_are_found_without_a_search(self):
        """Functions are called at several positions, after themselves or after each other."""
        (first, call_first), (second, call_second) = self.trees.function(), self.trees.function()
        root, others = self.trees.recording(first), self.trees.recording(second)
        children = [self.trees.recording(second, root), self.trees.recording(second, others)]
        inner = self.trees.recording(first, children[0])
        paths = [
            [(call_first, root), (call_second, children[0]), (call_first, inner)],
            [(call_second, others), (call_second, children[1])],
            [(call_first, root), (call_second, children[0])],
            [(call_second, others)],
        ]
        for times in range(4):
            for path in paths:
                self.step()
                with self.looked_for(0) if times > 1 else contextlib.nullcontext():
                    for call, node in path:
                        self.check(call, [], node)

    def fifty(self):
        """A function that follows another; it has a recording for each set of the other's outputs that is kept."""
        (first, call_first), (second, call_second) = self.trees.function(), self.trees.function()
        root = self.trees.recording(first, outputs=6)
        children = []
        for kept in range(50):
            dead = [(0, n) for n in range(6) if not kept >> n & 1]
            children.append(self.trees.recording(second, root, dead=dead))

        def run(kept, expected):
            self.step()
            self.check(call_first, [], root)
            held = [root.cached_tensor_outputs[n] for n in range(6) if kept >> n & 1]
            if expected is None:
                self.check_none(call_second, [])
            else:
                self.check(call_second, [], children[expected])
            del held

        return root, children, run

    def test_each_of_fifty_recordings_is_found_by_what_is_alive(self):
        """Recordings are found by their live outputs. Once these differ, no other recording is checked."""
        _, _, run = self.fifty()
        for _ in range(2):
            for kept in range(50):
                run(kept, kept)
        with self.looked_for(0):
            for kept in (*range(50), 49, 0, 31, 7, 7):
                run(kept, kept)
        for kept, expected in ((51, None), (50, None), (62, None), (48, 48)):  # no recording; then a known one
            run(kept, expected)

    def test_outputs_that_nothing_needs_rule_out_no_recording(self):
        (first, call_first), (second, call_second) = self.trees.function(), self.trees.function()
        root = self.trees.recording(first, outputs=2)
        weights = some(2)
        children = [self.trees.recording(second, root, static=[weight], dead=[(0, 1)]) for weight in weights]
        held = [root.cached_tensor_outputs[1]]
        pools = []

        def release(pool):
            pools.append(pool)
            return bool(held) and held.pop() is not None

        with mock.patch.object(candidates_module, "release_unneeded", release):
            self.step()
            self.check(call_first, [], root)
            self.check(call_second, weights[1:], children[1])
        self.assertEqual((held, pools), ([], [root.cuda_graphs_pool]))

    def test_the_first_of_several_that_accept_is_replayed(self):
        """If more than one fits, upstream's order decides."""
        root, children, run = self.fifty()
        children.reverse()
        root.children[1].reverse()
        for times in range(6):
            with self.looked_for(0) if times > 4 else contextlib.nullcontext():
                for kept, expected in ((0, 0), (1, 0), (2, 2), (16, 0), (49, 0), (47, 2), (15, 2)):
                    run(kept, expected)

    def test_an_output_that_only_torch_knows_to_be_held_is_alive(self):
        """Torch's reference is asked of each recording that may fit, in their order."""
        root, _, run = self.fifty()
        for _ in range(10):
            run(0, 0)
        reference = root.outputs_weakrefs[2]
        held, reference.is_held = root.cached_tensor_outputs[2].view(2, 2), True
        for kept, expected in ((0, 4), (1, 5), (2, 6), (4, 4), (48, None), (9, 13)):
            run(kept, expected)
        reference.is_held = False
        del held
        run(0, 0)

    def test_whether_a_step_begins_is_asked_each_time(self):
        number, call = self.trees.function()
        root = self.trees.recording(number)
        for count in (1, 1, 0):
            self.step()
            with self.looked_for(count):
                self.check(call, [], root)
        held = root.cached_tensor_outputs[0]
        with self.looked_for(1):
            self.check_none(call, [])
        del held
        with self.looked_for(2):  # a path whose outputs are all dead ends, and that is not remembered
            self.check(call, [], root)
            self.check(call, [], root)
        self.step()
        with self.looked_for(0):
            self.check(call, [], root)

    def test_candidates_are_forgotten_with_every_change_and_keep_no_recording(self):
        """The changes are a call by upstream, recordings that are to be made again, and the shutdown."""
        number, call = self.trees.function()
        nodes = [self.trees.recording(number)]
        nodes.append(self.trees.recording(number, nodes[0]))
        manager = self.trees.manager

        def upstream():
            with mock.patch.object(Upstream, "_run", lambda *_: ["upstream's"]):
                manager._run([], number)

        def forget():
            manager.reclaiming.record_again(number, "of the test", 0)
            manager.reclaiming.forgotten.clear()  # as if none were left to be given back

        def end():
            with mock.patch.object(Upstream, "shutdown", lambda _: None):
                manager.shutdown()

        for what in (upstream, forget, end):
            with self.subTest(what=what.__name__):
                for count in (2, None, 0):
                    self.step()
                    with contextlib.nullcontext() if count is None else self.looked_for(count):
                        for node in nodes:
                            self.check(call, [], node)
                what()
                self.assertEqual(manager._candidates, {})
        gone = [weakref.ref(node) for node in nodes]
        gc.disable()
        try:
            del node
            nodes.clear()
            self.trees.reset()
            self.assertEqual([reference() for reference in gone], [None] * 2)  # without a garbage collection
        finally:
            gc.enable()
        self.step()
        self.check_none(call, [])

    def test_remembered_places_are_not_too_many(self):
        (first, call_first), *others = [self.trees.function() for _ in range(7)]
        root = self.trees.recording(first)
        children = [(call, self.trees.recording(number, root)) for number, call in others]

        def run():
            for call, node in children:
                self.step()
                self.check(call_first, [], root)
                self.check(call, [], node)

        with mock.patch.object(candidates_module, "_MOST_PLACES", 4):
            for _ in range(3):
                run()
                self.assertLessEqual(len(self.trees.manager._candidates[first]), 4)
        run()
        with self.looked_for(0):
            run()


if __name__ == "__main__":
    run_tests()
