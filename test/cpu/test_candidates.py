"""The recording that is replayed if a function has several, and the filter in C++ that rules others out."""

import contextlib
import functools
import gc
import itertools
import sys
import unittest
import weakref
from types import SimpleNamespace
from unittest import mock

import torch
from fake_trees import SKIPPED, Graph, Plain, bare_manager, bare_recording, fail, some
from hypothesis import given, settings
from hypothesis import strategies as st
from test_trees import inference
from torch._inductor import cudagraph_trees
from torch.testing._internal.common_utils import TestCase, run_tests

from pygraph_trees.native import binding
from pygraph_trees.trees.functions import fast_path
from pygraph_trees.trees.managers import candidates as candidates_module
from pygraph_trees.trees.managers.calls import Upstream
from pygraph_trees.trees.managers.candidates import candidate_filter
from pygraph_trees.trees.pools.liveness import Deaths

EXAMPLES = settings(max_examples=200, deadline=None)
COUNT = 10  # tensors
KINDS = st.sampled_from(["held", "held in C++", "cached", "not cached", "list cleared"])
OUTPUTS = st.lists(st.tuples(KINDS, st.booleans()), max_size=5)
# For each recording: its static inputs, whether the last one has moved, and outputs that must be dead.
CHOICES = st.lists(
    st.tuples(st.lists(st.integers(0, COUNT - 1), max_size=12, unique=True), st.booleans(), st.none() | OUTPUTS),
    max_size=6,
)
MODE, EXECUTION = cudagraph_trees.CompilationMode, cudagraph_trees.ExecutionState.EXECUTION


class Reference:
    """Torch's weak reference to an output, which is alive while anything besides its recording holds it."""

    def __init__(self, outputs, index):
        self.outputs, self.index, self.is_held = outputs, index, False

    def __call__(self):
        return self.outputs[self.index] if self.is_held or sys.getrefcount(self.outputs[self.index]) > 2 else None

    def data_ptr(self):
        return self.outputs[self.index].data_ptr()


@unittest.skipIf(binding.extension is None, "not built for this torch")
class TestCandidates(TestCase):
    """Recordings check and replay as usual, but their graphs do nothing."""

    def setUp(self):
        super().setUp()
        self.enterContext(mock.patch.object(cudagraph_trees.MarkStepBox, "mark_step_counter", -1))
        self.steps = itertools.count(2)
        self.roots, self.wrapped, self.replayed = {}, {}, []
        self.manager = bare_manager(roots=self.roots, warmed_up_functions=self.wrapped, ids_to_funcs=self.wrapped)

    def function(self):
        """A function's number, and its entry."""
        model = inference(indirection="auto")
        model.dispatch.add()
        number = len(self.wrapped)
        self.wrapped[number] = SimpleNamespace(id=number, model=model, mutated_input_idxs=())
        model.dispatch.may_be_replayed_by(self.manager, number)
        return number, fast_path.entry(model.dispatch)

    def recording(self, number, parent=None, *, static=(), outputs=1, dead=()):
        """Adds a recording of a function after ``parent``; ``dead``: the outputs on the path that must be dead."""
        cached, replayed = some(outputs), self.replayed
        node = bare_recording(
            parent,
            [Reference(cached, index) for index in range(outputs)],
            wrapped_function=self.wrapped[number],
            id=object(),
            tensor_static_input_idxs=range(len(static)),
            static_input_idxs=range(len(static)),
            static_input_data_ptrs=[tensor.data_ptr() for tensor in static],
            expected_dead_indices_before_graph=list(dead),
            outputs_metadata=[{"data_ptr": tensor.untyped_storage().data_ptr()} for tensor in cached],
            static_output_tensors=[None] * outputs,
            cached_tensor_outputs=cached,
            graph=Graph(launches=0),
            log=Plain(counter=binding.new_counter()),
        )
        node._prepare_checks()
        node.native = node._native(in_python=False)
        name = id(node)
        node.graph.at_launch = lambda: replayed.append(name)
        (self.roots if parent is None else parent.children).setdefault(number, []).append(node)
        return node

    def skips(self, number, place, skipped=True):
        """Upstream has decided whether it graphs the function after a recording, or at the roots (None)."""
        vars(self.manager)[SKIPPED][place if place is None else place.id][number] = skipped

    def check_step(self, *calls):
        """A step begins; each call must replay its recording."""
        cudagraph_trees.MarkStepBox.mark_step_counter = -next(self.steps)
        for call, node in calls:
            self.check(call, node)

    def check(self, call, node, inputs=()):
        """Asserts that ``node`` is replayed; None if nothing is, and nothing changes."""
        left, manager, before = list(inputs), self.manager, self.manager.current_node
        outputs = call(left)
        if node is None:
            self.assertEqual((outputs, left, self.replayed), (None, [*inputs], []))
            self.assertIs(manager.current_node, before)
            return
        self.assertEqual([id(one) for one in outputs], [id(one) for one in node.cached_tensor_outputs])
        self.assertEqual((left, self.replayed.pop(), self.replayed), ([], id(node), []))
        self.assertIs(manager.current_node, node)
        self.assertEqual((manager.path_state, manager.mode, manager.compile_id), (EXECUTION, MODE.INFERENCE, "3/1"))
        self.assertEqual(manager.current_gen, manager.get_curr_generation())

    def check_after(self, change, is_replayed):
        """Whether a function's only recording is replayed when a step begins, after a change at its last position."""
        self.setUp()
        number, call = self.function()
        self.check_step((call, node := self.recording(number)))
        change(number, node)
        self.manager._candidates.clear()
        self.check_step()
        self.assertEqual(call([]) is not None, is_replayed)
        self.assertEqual(self.replayed, [id(node)] * is_replayed)

    def test_calls_that_are_left_to_upstream(self):
        """Upstream gave up there after too many recordings, or because of an input; or it must warm up or record."""
        states = cudagraph_trees.ExecutionState

        def put(**facts):
            for fact in facts.items():
                setattr(self.manager, *fact)

        def own_memory_once_the_path_ends(number, node):
            policy, end = Plain(changing=False), self.manager.try_end_curr_execution
            self.manager.output_policy = policy
            self.manager.try_end_curr_execution = lambda: (end(), setattr(policy, "changing", True))

        changes = {
            "it was never recorded": lambda number, _: self.wrapped[number].model.dispatch.may_be_replayed_by(
                self.manager, number + 1
            ),
            "another function is warmed up": lambda *_: put(path_state=states.WARMUP),
            "another function is recorded": lambda *_: put(path_state=states.RECORDING),
            "it is to be warmed up again": lambda *_: put(warmed_up_functions=set()),
            "the manager is shut down": lambda *_: put(graph=None),
            "it is not graphed after the node": lambda number, node: self.skips(number, node),
            "it is not graphed at the roots": lambda number, _: self.skips(number, None),
            "it was recorded too often": lambda *_: put(exceed_rerecord_limit=lambda node_id, _: node_id is None),
            "outputs are given own memory": lambda *_: put(output_policy=Plain(changing=True), current_node=None),
            "outputs are found that are given own memory": own_memory_once_the_path_ends,
            "upstream's own recording is asked first": lambda number, _: self.roots[number].insert(0, object()),
            "only upstream can check it": lambda number, node: setattr(node, "native", None),
        }
        for what, change in changes.items():
            with self.subTest(what):
                self.check_after(change, False)
        self.check_after(lambda number, _: self.roots[number].append(object()), True)

    def test_a_function_that_mutates_inputs_asks_first_whether_it_may(self):
        """Upstream's decision after the last recording does not matter if each step ends the path."""
        self.enterContext(mock.patch("torch.cuda.is_current_stream_capturing", lambda: False))

        def mutates(after, at_roots, keeps, number, node):
            self.wrapped[number].mutated_input_idxs = (0,)
            self.manager.keeps_outputs = keeps
            for place, skipped in ((node, after), (None, at_roots)):
                if skipped is not None:
                    self.skips(number, place, skipped)

        for after, at_roots, keeps, graphs in (
            (None, None, False, False),
            (True, None, False, False),
            (False, None, False, False),
            (False, True, False, False),
            (False, False, False, True),
            (None, False, False, False),
            (None, False, True, True),
        ):
            with self.subTest(after=after, at_roots=at_roots, keeps=keeps):
                self.check_after(functools.partial(mutates, after, at_roots, keeps), graphs)

    @contextlib.contextmanager
    def looked_for(self, count):
        """Asserts how often candidates are searched, unless ``count`` is None."""
        with mock.patch.object(self.manager, "_find", wraps=self.manager._find) as found:
            yield
        self.assertEqual(found.call_count, found.call_count if count is None else count)

    def fifty(self):
        """A function that follows another; it has a recording for each set of the other's outputs that is kept."""
        (first, call_first), (second, call_second) = self.function(), self.function()
        root = self.recording(first, outputs=6)
        dead = [[(0, n) for n in range(6) if not kept >> n & 1] for kept in range(50)]
        children = [self.recording(second, root, dead=those) for those in dead]

        def run(kept, expected):
            self.check_step((call_first, root))
            held = [root.cached_tensor_outputs[n] for n in range(6) if kept >> n & 1]
            self.check(call_second, None if expected is None else children[expected])
            del held

        return root, children, run

    def test_each_of_fifty_recordings_is_found_by_what_is_alive(self):
        """Recordings are found by their live outputs. Once these differ, no other recording is checked."""
        _, _, run = self.fifty()
        for kept in (*range(50), *range(50)):
            run(kept, kept)
        with self.looked_for(0):
            for kept in (*range(50), 49, 0, 31, 7, 7):
                run(kept, kept)
        for kept, expected in ((51, None), (50, None), (62, None), (48, 48)):  # no recording; then a known one
            run(kept, expected)

    def test_outputs_that_nothing_needs_rule_out_no_recording(self):
        (first, call_first), (second, call_second) = self.function(), self.function()
        root = self.recording(first, outputs=2)
        weights = some(2)
        children = [self.recording(second, root, static=[weight], dead=[(0, 1)]) for weight in weights]
        held = [root.cached_tensor_outputs[1]]
        release = mock.Mock(side_effect=lambda pool: bool(held) and held.pop() is not None)
        with mock.patch.object(candidates_module, "release_unneeded", release):
            self.check_step((call_first, root))
            self.check(call_second, children[1], weights[1:])
        release.assert_called_once_with(root.cuda_graphs_pool)
        self.assertEqual(held, [])

    def test_the_first_of_several_that_accept_is_replayed(self):
        """If more than one fits, upstream's order decides."""
        root, children, run = self.fifty()
        children.reverse()
        root.children[1].reverse()
        for times in range(6):
            with self.looked_for(0 if times > 4 else None):
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
        number, call = self.function()
        root = self.recording(number)
        for count in (1, 1, 0):
            with self.looked_for(count):
                self.check_step((call, root))
        held = root.cached_tensor_outputs[0]
        with self.looked_for(1):
            self.check(call, None)
        del held
        with self.looked_for(2):  # a path whose outputs are all dead ends, and that is not remembered
            self.check(call, root)
            self.check(call, root)
        with self.looked_for(0):
            self.check_step((call, root))

    def test_candidates_are_forgotten_with_every_change_and_keep_no_recording(self):
        """The changes are a call by upstream, recordings that are to be made again, and the shutdown."""
        number, call = self.function()
        nodes = [self.recording(number)]
        nodes.append(self.recording(number, nodes[0]))
        manager = self.manager

        def forget():
            manager.reclaiming.record_again(number, "of the test", 0)
            manager.reclaiming.forgotten.clear()  # as if none were left to be given back

        self.enterContext(mock.patch.multiple(Upstream, _run=lambda *_: ["upstream's"], shutdown=lambda _: None))
        for what in (lambda: manager._run([], number), forget, manager.shutdown):
            with self.subTest(what=what):
                for count in (2, None, 0):
                    with self.looked_for(count):
                        self.check_step(*((call, node) for node in nodes))
                what()
                self.assertEqual(manager._candidates, {})
        gone = [weakref.ref(node) for node in nodes]
        gc.disable()
        self.addCleanup(gc.enable)
        nodes.clear()
        self.roots.clear()  # as upstream does when it resets its trees
        manager._candidates.clear()
        manager.current_node = None
        self.assertEqual([reference() for reference in gone], [None] * 2)  # without a garbage collection
        self.check_step((call, None))

    def test_remembered_places_are_not_too_many(self):
        (first, call_first), *others = [self.function() for _ in range(7)]
        root = self.recording(first)
        children = [(call, self.recording(number, root)) for number, call in others]

        def run():
            for child in children:
                self.check_step((call_first, root), child)

        with mock.patch.object(candidates_module, "_MOST_PLACES", 4):
            for _ in range(3):
                run()
                self.assertLessEqual(len(self.manager._candidates[first]), 4)
        run()
        with self.looked_for(0):
            run()


class Outputs:
    """Cached outputs of one recording, of the given kinds."""

    def __init__(self, drawn):
        self.holders, self.places = [], []
        cached, cleared, references, are_dead = [], [], [], []
        for index, (kind, dead) in enumerate(drawn):
            cached.append(None if kind == "not cached" else torch.zeros(2))
            if kind == "held":
                self.holders.append(cached[-1])
            elif kind == "held in C++":
                self.holders.append(cached[-1].detach())
            are_dead.append(kind == "cached" or (dead and not kind.startswith("held")))
            references.append(lambda dead=are_dead[-1]: None if dead else 7)
            self.places.append((cleared if kind == "list cleared" else cached, references, index, 8 * index))
        self.are_dead = all(are_dead)


def some_tensors():
    kinds = [torch.zeros(3), torch.nn.Parameter(torch.zeros(2)), torch.zeros(0), torch.zeros(8)[3:]]
    return [kinds[i % 4] if i % 3 else torch.zeros(5) for i in range(COUNT)]


class TestDeaths(TestCase):
    def test_unneeded_references_are_released(self):
        release = mock.Mock(side_effect=[False, True])
        references = [lambda: None, lambda: None if release.call_count == 2 else 7]
        deaths = Deaths([([None] * 2, references, n, 0) for n in range(2)], release)
        self.assertEqual((deaths.ask(), release.call_count), (False, 1))  # nothing was released
        self.assertEqual((deaths.ask(), deaths.ask(), release.call_count), (True, True, 2))


@unittest.skipIf(binding.extension is None, "not built for this torch")
class TestCandidateFilter(TestCase):
    @EXAMPLES
    @given(CHOICES, st.integers(0, 8), st.sampled_from([1, 30]))
    def test_no_recording_that_fits_is_passed_over(self, drawn, begin, times):
        """The recording that the filter names need not fit: the filter stops once at most one is left."""
        given_ = some_tensors()
        choices, outputs = [], []
        for fixed, last_moved, kinds in drawn * times:
            where = [given_[index].data_ptr() for index in fixed]
            if last_moved and fixed:
                where[-1] += 1
            outputs.append(None if kinds is None else Outputs(kinds))
            deaths = None if kinds is None else Deaths(outputs[-1].places, fail)
            choices.append((list(zip(fixed, where, strict=True)), deaths))

        def fits(number):
            fixed, deaths = choices[number]
            are_there = all(given_[index].data_ptr() == address for index, address in fixed)
            return are_there and (deaths is None or outputs[number].are_dead)

        find = candidate_filter(choices)
        position = find(begin, given_)
        while position < len(choices) and not fits(position):
            position = find(position + 1, given_)
        self.assertEqual(min(position, len(choices)), next(filter(fits, range(begin, len(choices))), len(choices)))

    def test_outputs_and_addresses_rule_recordings_out(self):
        """There are more recordings than bits in a word. Each call looks again; torch's references are not called."""
        given_, cached = some_tensors()[:4], [torch.zeros(1) for _ in range(7)]
        choices = [
            (
                [(0, given_[0].data_ptr()), (1, given_[1].data_ptr() + (number >= 64))],
                Deaths([(cached, [fail] * 7, n, 0) for n in range(7) if not number >> n & 1], fail),
            )
            for number in range(128)
        ]
        find = candidate_filter(choices)
        for kept in (0, 1, 2, 63, 37):
            held = [cached[n] for n in range(7) if kept >> n & 1]
            self.assertEqual(find(0, given_), kept)
            held.append(cached[6])
            self.assertGreaterEqual(find(0, given_), 127)  # the filter does not check the last recording that is left
            del held
        self.assertEqual([find(n, given_) for n in (63, 64, 127, 128, 200)], [63, 128, 127, 128, 128])
        self.assertEqual([find(n, [given_[0], torch.zeros(9)[1:]]) for n in (0, 126, 127)], [128, 128, 127])
        held = cached[6].detach()  # a reference in C++ alone
        self.assertEqual(find(5, given_), 5)
        held = list(cached)
        cached.clear()
        self.assertEqual(find(5, given_), 5)  # outputs that are gone rule out nothing
        del held
        self.assertEqual([candidate_filter([])(n, []) for n in (0, 3)], [0, 0])
        self.assertRaises((TypeError, IndexError), find, 0, given_[:1])

    def test_references(self):
        x, lists = [torch.zeros(1)], [[torch.zeros(1)] for _ in range(3)]
        for is_cycle in (False, True):
            before = [*map(sys.getrefcount, [*x, *lists])]
            find = candidate_filter([([(0, 7)], Deaths([(cached, [None], 0, 0)], fail)) for cached in lists])
            self.assertEqual([find(0, x) for _ in range(9)], [0] * 9)
            if is_cycle:
                lists[0].append(find)
                gone = weakref.ref(lists[0][0])
                del lists[0], before[1]
            del find
            gc.collect()
            self.assertEqual([*map(sys.getrefcount, [*x, *lists])], before)
        self.assertIsNone(gone())


if __name__ == "__main__":
    run_tests()
