"""A steady replay in C++, around fakes of what it goes through: a manager, a recording, its graph and its live inputs."""

from __future__ import annotations

import gc
import itertools
import sys
import unittest
import weakref
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._dynamo.mutation_guard import GenerationTracker
from torch._inductor import cudagraph_trees
from torch.testing._internal.common_utils import TestCase, run_tests

from pygraph_trees import tensors
from pygraph_trees.trees import steady

MODE = cudagraph_trees.CompilationMode
EXECUTION = cudagraph_trees.ExecutionState.EXECUTION
EXAMPLES = settings(max_examples=200, deadline=None)
NUMBERS = st.integers(0, 5)


class Failed(Exception): ...


class Plain:
    """Attributes."""

    def __init__(self, **attributes):
        self.__dict__.update(attributes)


class Manager:
    __slots__ = (
        "__weakref__",
        "_current_node",
        "_ways",
        "compile_id",
        "current_gen",
        "graph",
        "has_live_user_visible_output_cloning",
        "mode",
        "path_state",
        "running_forwards_with_pending_backwards",
    )


class OpenManager:
    """The same without slots."""


class Graph:
    def __init__(self):
        self.launches = 0
        self.at_launch = lambda: None

    def replay(self):
        self.launches += 1
        self.at_launch()


class Live:
    """Live inputs whose addresses a graph is given; it settles on those that it is asked for."""

    def __init__(self, patched=(), outputs=None, refuses=False):
        self.patched = [Plain(index=index) for index in patched]
        self.outputs = outputs or {}
        self.temporary = {}
        self.prepared = []
        self.answer = lambda: None
        self._settled, self._pool, self._pool_seen = None, Plain(changes=3), 3

    def prepare(self, inputs, seen):
        self.prepared.append((list(inputs), seen))
        why_not = self.answer()
        if why_not is None:
            self._settled, self._pool_seen = seen, self._pool.changes
        return why_not


class Recording:
    def __init__(self, fixed, cached, live=None, before=None, after=None):
        self.graph, self.log, self.live = Graph(), Plain(replays=0), live
        self.cached_tensor_outputs = cached
        self.deaths_before, self.deaths_after = before, after
        patched = [] if live is None else [item.index for item in live.patched]
        self.whereabouts = tensors.Whereabouts(list(fixed), [t.data_ptr() for t in fixed.values()], patched)
        self.calls = []
        self.own = list(cached)  # as it is reconstructed
        self.are_held = True

    def replay(self, inputs):
        self.calls.append(("replay", list(inputs)))
        inputs.clear()
        return list(self.own)

    def _own_outputs(self):
        self.calls.append("own outputs")
        return list(self.own)

    def _check_what_died(self):
        self.calls.append("check")
        if self.are_held:
            raise Failed("held")


class Trees:
    """A function, its manager, and the way to its only recording."""

    def __init__(self, fixed, cached, *, manager=Manager, managed=(), others=None, mode=MODE.INFERENCE, **recording):
        self.recording = Recording(fixed, cached, **recording)
        self.graph, self.log, self.live = self.recording.graph, self.recording.log, self.recording.live
        native = steady.replay(self.recording, managed, [NotImplemented] * len(cached) if others is None else others)
        self.before = object()  # the recording that is replayed before
        self.way = Plain(node=self.before, begins=None, replay=native, mode=mode, compile_id=object())
        self.manager = manager()
        self.manager.graph = object()
        self.manager._ways = {7: self.way}
        self.manager.mode = self.manager.compile_id = self.manager.path_state = None
        self.manager.current_gen = -5
        self.manager.running_forwards_with_pending_backwards = None
        self.function = Plain(manager=lambda: self.manager, function_id=7, was_asked=False)
        self.handed = []
        self.answer = object()
        self.partition = object()
        self.partitions = [self.partition]

    def by_hand(self, inputs):
        self.handed.append((inputs, list(inputs)))
        return self.answer

    def entry(self, *, around=False, **arguments):
        """What it gives for inputs, behind the same recording each time."""
        runner = (self.partitions, self.partition) if around else None
        made = steady.entry(self.by_hand, self.function, runner=runner, **arguments)

        def call(inputs):
            if self.manager is not None:
                self.manager._current_node = self.before
            return made(inputs)

        return call

    def state(self):
        names = ("mode", "compile_id", "_current_node", "path_state", "current_gen")
        return [getattr(self.manager, name) for name in (*names, "running_forwards_with_pending_backwards")]


class Held:
    """torch's reference to an output: it is held, as far as torch can tell. What C++ sees to be dead is not asked."""

    asked = 0

    def __call__(self):
        self.asked += 1
        return 7


def some(count):
    made = [torch.full((4,), float(i)) for i in range(count)]
    for tensor in made:
        tensor.untyped_storage()  # as torch's own reference to the storage does
    return made


def deaths(cached, *indices):
    return tensors.Deaths([(cached, [Held() for _ in cached], index) for index in indices])


def inverse(order):
    return [order.index(number) for number in range(len(order))]


def references_to(items):
    return [sys.getrefcount(item) for item in items]


class Case(TestCase):
    def setUp(self):
        super().setUp()
        patch = mock.patch.object(cudagraph_trees.MarkStepBox, "mark_step_counter", 0)
        patch.start()
        self.addCleanup(patch.stop)

    def assertAreSame(self, found, expected):
        self.assertEqual(len(found), len(expected))
        for one, other in zip(found, expected, strict=True):
            self.assertIs(one, other)

    def check_untouched(self, trees, inputs, given_):
        """Nothing was done."""
        self.assertAreSame(inputs, given_)
        self.assertEqual((trees.graph.launches, trees.log.replays, trees.recording.calls), (0, 0, []))
        self.assertIs(trees.manager._current_node, trees.before)
        self.assertIsNone(trees.manager.mode)


class TestPython(Case):
    def test_without_the_native_module(self):
        recording = Recording({}, some(1))
        with mock.patch.object(tensors, "native", None):
            self.assertIs(steady.entry(len, object(), order=[1, 0]), len)
            self.assertIsNone(steady.replay(recording, (), [NotImplemented]))

    def test_what_holds_no_graph(self):
        recording = Recording({}, some(1))
        recording.graph = None
        self.assertIsNone(steady.replay(recording, (), [NotImplemented]))


@unittest.skipIf(tensors.load_native() is None, "not built for this torch")
class TestEntry(Case):
    def test_a_steady_call(self):
        for manager, (mode, pending) in itertools.product(
            (Manager, OpenManager), ((MODE.FORWARD, True), (MODE.BACKWARD, False), (MODE.INFERENCE, None))
        ):
            given_, cached = some(2), some(3)
            trees = Trees({0: given_[0], 1: given_[1]}, cached, manager=manager, mode=mode)
            call = trees.entry()
            for number in range(1, 4):
                asked, were = tensors.native.counts()
                inputs = list(given_)
                found = call(inputs)
                self.assertIsInstance(found, list)
                self.assertAreSame(found, cached)
                self.assertEqual(inputs, [])
                self.assertEqual((trees.graph.launches, trees.log.replays), (number, number))
                expected = (mode, trees.way.compile_id, trees.recording, EXECUTION, GenerationTracker.generation)
                self.assertAreSame(trees.state(), [*expected, pending])
                self.assertEqual(tensors.native.counts(), (asked + 1, were + 1))
            self.assertEqual((trees.handed, trees.recording.calls, len(cached)), ([], [], 3))
            self.assertFalse(trees.function.was_asked)

    def test_what_is_not_cached(self):
        cached = [None, *some(1), None, None]
        static = torch.zeros(1)
        found = Trees({}, cached, others=[3, NotImplemented, None, static]).entry()([])
        self.assertAreSame(found, [3, cached[1], None, static])

    def test_an_input_that_moved(self):
        for around, order in itertools.product((False, True), (None, [2, 0, 1])):
            given_ = some(3)
            trees = Trees({1: given_[0 if order else 1]}, some(1))
            call = trees.entry(around=around, order=order, kept=[1], picks=[0])
            inputs = [t.clone() for t in given_]
            before = list(inputs)
            asked, were = tensors.native.counts()
            self.assertIsNone(call(inputs))
            self.check_untouched(trees, inputs, before)
            self.assertEqual((trees.function.was_asked, trees.handed), (around, []))
            self.assertEqual(tensors.native.counts(), (asked + 1, were))
            self.assertIsNotNone(call(list(given_)))
            self.assertEqual(trees.graph.launches, 1)

    def test_what_is_returned(self):
        """The same as of a row of outputs, kept inputs, views of both, and constants."""

        @EXAMPLES
        @given(st.data())
        def check(data):
            order = data.draw(st.none() | st.integers(1, 6).flatmap(lambda n: st.permutations(range(n))))
            given_ = some(4 if order is None else len(order))
            numbers = st.integers(0, len(given_) - 1)
            theirs = given_ if order is None else [given_[index] for index in order]  # the function's
            fixed = {index: theirs[index] for index in data.draw(st.sets(numbers))}
            static = torch.zeros(4)
            kinds = [(torch.zeros(2, 4)[1], NotImplemented), (None, static), (None, 5), (None, None)]
            outputs = [data.draw(st.sampled_from(kinds)) for _ in range(data.draw(NUMBERS))]
            cached, others = [kind[0] for kind in outputs], [kind[1] for kind in outputs]
            returned = {}  # as they are
            for position in data.draw(st.sets(st.integers(0, 5))):
                if position < len(outputs):
                    returned[position] = data.draw(numbers), None
                    cached[position], others[position] = None, data.draw(st.sampled_from([static, NotImplemented]))
            live = None
            if returned:
                live = Live(outputs=returned)
                live._settled = []
            trees = Trees(fixed, cached, live=live, others=others)
            made = [other if tensor is None else tensor for tensor, other in zip(cached, others, strict=True)]
            trees.recording.own = [static if one is NotImplemented else one for one in made]
            for position, (index, _) in returned.items():
                made[position] = theirs[index]
            kept = data.draw(st.lists(numbers, max_size=3))
            constants = data.draw(st.lists(st.sampled_from([None, 7, "constant"]), max_size=2))
            tensors_ = [*made, *(given_[index] for index in kept)]
            viewable = [number for number, one in enumerate(tensors_) if isinstance(one, torch.Tensor)]
            view = st.tuples(st.sampled_from(viewable or [0]), st.sampled_from([(2, 2), (1,), (0,)]), st.integers(-1, 0))
            drawn = data.draw(st.lists(view, max_size=3)) if viewable else []
            views = [(n, s, (2, 1)[-len(s) :], o * (tensors_[n].storage_offset() > 0)) for n, s, o in drawn]
            row = [*tensors_, *views, *constants]
            picks = data.draw(st.lists(st.integers(0, len(row) - 1), max_size=8)) if row else []
            call = trees.entry(order=order, kept=kept, picks=picks, constants=constants, views=views)

            for _ in range(3):
                inputs = list(given_)
                found = call(inputs)
                self.assertEqual(inputs, [])
                self.assertIsInstance(found, tuple)
                self.assertEqual(len(found), len(picks))
                for one, pick in zip(found, picks, strict=True):
                    if not isinstance(row[pick], tuple):
                        self.assertIs(one, row[pick])
                        continue
                    number, sizes, strides, offset = row[pick]
                    base = tensors_[number]
                    seen = (tuple(one.shape), one.stride(), one.storage_offset(), one.untyped_storage().data_ptr())
                    storage = base.untyped_storage().data_ptr()
                    self.assertEqual(seen, (sizes, strides, base.storage_offset() + offset, storage))
                    self.assertIs(one, found[picks.index(pick)])  # made once
            self.assertEqual((trees.graph.launches, trees.handed), (3, []))

        check()

    def test_what_cannot_be_returned(self):
        for error, arguments in (
            (IndexError, {"picks": [2]}),
            (IndexError, {"picks": [0], "views": [(2, (1,), (1,), 0)]}),
            (TypeError, {"picks": [0], "views": [(1, (1,), (1,), 0)]}),
            (RuntimeError, {"picks": [0], "views": [(0, (1, 1), (1,), 0)]}),
        ):
            with self.subTest(arguments=arguments), self.assertRaises(error):
                Trees({}, [*some(1), None], others=[None, 3]).entry(**arguments)([])

    def test_outputs_are_inputs(self):
        given_, cached = some(3), [*some(1), None]
        for view, order in itertools.product((None, ((1,), (1,), 0, torch.float32)), (None, [2, 0, 1])):
            live = Live([1], {1: (1, view)})
            trees = Trees({}, cached, live=live, others=[NotImplemented, torch.empty(0)])
            trees.recording.own = [cached[0], "of the input"]
            theirs = given_ if order is None else [given_[index] for index in order]
            call = trees.entry(order=order, kept=[0], picks=[1, 0, 2])
            inputs = list(given_)
            found = call(inputs)
            self.assertAreSame(found, ["of the input" if view else theirs[1], cached[0], given_[0]])
            self.assertEqual(inputs, [])
            if view is None:
                self.assertEqual((trees.recording.calls, trees.graph.launches), ([], 1))
            else:
                ((name, seen),) = trees.recording.calls
                self.assertEqual((name, trees.graph.launches), ("replay", 0))
                self.assertAreSame(seen, theirs)

    def test_outputs_that_torch_has_to_make(self):
        def hook(trees):
            trees.recording.cached_tensor_outputs[1].requires_grad_().register_hook(lambda gradient: None)

        def clear(trees):
            trees.recording.cached_tensor_outputs.clear()

        def forget(trees):
            trees.recording.cached_tensor_outputs[0] = None

        for change, picks, is_input in itertools.product((hook, clear, forget), (None, [2, 0]), (False, True)):
            given_, cached = some(1), some(2)
            live = Live([], {0: (0, None)}) if is_input else None
            if live is not None:
                live._settled = []
                change = clear if change is forget else change
            trees = Trees({}, cached, live=live)
            call = trees.entry(kept=[0], picks=picks)
            change(trees)
            inputs = list(given_)
            found = call(inputs)
            first = given_[0] if is_input else trees.recording.own[0]
            self.assertAreSame(found, [first, trees.recording.own[1]] if picks is None else [given_[0], first])
            self.assertEqual((inputs, trees.recording.calls, trees.graph.launches), ([], ["own outputs"], 1))

    def test_who_is_asked_by_hand(self):
        def change(name, value):
            return lambda trees: setattr(trees, name, value)

        def of(owner, name, value):
            return lambda trees: setattr(getattr(trees, owner), name, value)

        def begins(trees):
            trees.way.begins = False

        def goes_on(trees):
            trees.way.begins, trees.manager.current_gen = True, GenerationTracker.generation

        def waits(trees):
            trees.way.begins, trees.manager.running_forwards_with_pending_backwards = True, True

        def clones(trees):
            trees.manager.has_live_user_visible_output_cloning = True

        def has_died(trees):
            trees.way.replay = steady.replay(Recording({}, some(1)), (), [NotImplemented])

        cases = {
            "no manager": lambda trees: setattr(trees.function, "manager", lambda: None),
            "no graph": of("manager", "graph", None),
            "no way": of("manager", "_ways", {}),
            "no dictionary": of("manager", "_ways", None),
            "no replay": of("way", "replay", None),
            "something else": of("way", "replay", object()),
            "behind another one": of("way", "node", object()),
            "begins": begins,
            "goes on": goes_on,
            "waits for a backward": waits,
            "may clone": clones,
            "another partition": lambda trees: trees.partitions.__setitem__(0, object()),
            "more partitions": lambda trees: trees.partitions.append(object()),
            "no partition": lambda trees: trees.partitions.clear(),
            "a recording that is gone": has_died,
            **{f"no {n}": lambda trees, n=n: delattr(trees.manager, n) for n in ("graph", "_ways", "current_gen")},
            "no begins": lambda trees: delattr(trees.way, "begins"),
            "no function_id": lambda trees: delattr(trees.function, "function_id"),
            "no cloning": lambda trees: None,  # that attribute
        }
        for (name, prepare), manager in itertools.product(cases.items(), (Manager, OpenManager)):
            with self.subTest(name), mock.patch.object(steady, "_MAY_CLONE", name in ("may clone", "no cloning")):
                given_ = some(2)
                trees = Trees({0: given_[1]}, some(1), manager=manager)
                call = trees.entry(around=True, order=[1, 0], kept=[1], picks=[0, 1])
                prepare(trees)
                asked = tensors.native.counts()
                inputs = list(given_)
                self.assertIs(call(inputs), trees.answer)
                ((handed, seen),) = trees.handed
                self.assertIs(handed, inputs)
                self.assertAreSame(seen, given_)
                self.check_untouched(trees, inputs, given_)
                self.assertEqual((trees.function.was_asked, tensors.native.counts()), (False, asked))

    def test_inputs_that_python_has_to_see(self):
        a, b = some(2)
        for inputs in ((a, b), [a], [a, b, a], [], [a, 3], [a, None], 3, type("List", (list,), {})([a, b])):
            trees = Trees({0: b}, some(1))
            trees.by_hand = mock.Mock(return_value=trees.answer)
            self.assertIs(trees.entry(order=[1, 0], picks=[0])(inputs), trees.answer)
            (seen,) = trees.by_hand.call_args.args
            self.assertIs(seen, inputs)
            self.assertEqual((trees.by_hand.call_count, trees.graph.launches), (1, 0))
        for arguments in ({"kept": [5]}, {}):  # without an order its length is not known
            trees = Trees({} if arguments else {5: a}, some(1))
            self.assertIs(trees.entry(picks=[0], **arguments)([a]), trees.answer)

    def test_when_a_step_begins(self):
        generation = GenerationTracker.generation
        for marked, current, pending, expected in (
            (0, generation, False, False),
            (0, generation - 1, False, True),
            (0, generation - 1, True, False),
            (-3, generation, False, True),
            (-3, generation, True, True),  # the user's word
            (-3, -3, False, False),
        ):
            for begins, clones in itertools.product((None, False, True), repeat=2):
                with (
                    self.subTest(marked=marked, current=current, pending=pending, begins=begins, clones=clones),
                    mock.patch.object(cudagraph_trees.MarkStepBox, "mark_step_counter", marked),
                    mock.patch.object(steady, "_MAY_CLONE", clones is not None),
                ):
                    trees = Trees({}, some(1))
                    trees.way.begins, trees.manager.current_gen = begins, current
                    trees.manager.running_forwards_with_pending_backwards = pending
                    trees.manager.has_live_user_visible_output_cloning = clones
                    found = trees.entry()([])
                    fits = begins in (None, expected) and not (clones and expected)
                    self.assertEqual((found is not trees.answer, trees.graph.launches), (fits, int(fits)))
                    self.assertEqual(trees.manager.current_gen, (marked or generation) if fits else current)

    def test_it_raises(self):
        def fail(*_):
            raise Failed

        given_ = some(1)
        trees = Trees({0: given_[0]}, some(1))
        trees.graph.at_launch = fail
        with self.assertRaises(Failed):
            trees.entry()(list(given_))
        self.assertEqual(trees.handed, [])
        trees = Trees({}, [])
        trees.recording._own_outputs = fail
        with self.assertRaises(Failed):
            trees.entry()([])
        trees = Trees({}, some(1))
        trees.function.manager = fail
        with self.assertRaises(Failed):
            trees.entry()([])
        trees = Trees({0: given_[0]}, some(1))
        inputs = [torch.eye(3).to_sparse()]
        with self.assertRaises(RuntimeError):
            trees.entry()(inputs)
        self.assertEqual(len(inputs), 1)

    def test_bad_arguments(self):
        recording = Recording({}, some(1))
        with mock.patch.object(tensors, "native", Plain(Entry=dict, Replay=dict)):
            entry = steady.entry(self.fail, object(), order=[1, 0], picks=[0])
            replay = steady.replay(recording, (), [NotImplemented])
        for type_, good, bad in (
            (tensors.native.Entry, entry, {"order": [b"1", 3, bytes([2, *bytes(15)])], "kept": [None, b"1"]}),
            (tensors.native.Entry, entry, {"picks": [3, b"1"], "constants": [[], None], "views": [3, [()]]}),
            (tensors.native.Entry, entry, {"views": [[(0, [1], (1,), 0)], [(0, ("1",), (1,), 0)], [("0", (), (), 0)]]}),
            (tensors.native.Entry, entry, {"runner": [((), 3), ([],)], "steps": [3], "generations": [3], "more": [3]}),
            (tensors.native.Replay, replay, {"cached": [(), None], "others": [(), None], "places": [b"12345678", 3]}),
            (tensors.native.Replay, replay, {"patched": [b"1", None], "managed": [b"1", None], "returned": [bytes(8)]}),
            (tensors.native.Replay, replay, {"before": [3, (), ([], 3)], "after": [((((), b""),), 3), ((([], 3),), 3)]}),
        ):
            type_(**good)
            for name, values in bad.items():
                for value in values:
                    with self.subTest(name=name, value=value), self.assertRaises((TypeError, ValueError)):
                        type_(**(good | {name: value}))
                if name in good:
                    with self.assertRaises(TypeError):
                        type_(**{key: value for key, value in good.items() if key != name})
        made = tensors.native.Entry(**entry)
        for arguments, keywords in (((), {}), (([], []), {}), (([],), {"more": 3}), ((), {"inputs": []})):
            with self.assertRaises(TypeError):
                made(*arguments, **keywords)

    def test_references(self):
        """As many behind many calls as before, of whatever kind."""
        given_, cached, earlier, constant = some(3), some(2), some(1), object()
        moved = [t.clone() for t in given_]
        for order, returned in itertools.product((None, [2, 0, 1]), ({}, {1: (0, None)})):
            theirs = given_ if order is None else [given_[index] for index in order]
            live = Live([2], returned)
            trees = Trees({1: theirs[1]}, cached, live=live, before=deaths(earlier, 0), managed=[0])
            views = [(0, (2,), (1,), 1), (2, (1,), (1,), 0)]
            calls = [
                trees.entry(order=order, around=True, kept=[1], picks=[0, 1, 2, 3, 4, 5], constants=[constant], views=views),
                trees.entry(order=order),
                trees.entry(order=order, kept=[0], picks=[9]),  # raises
            ]
            things = [*given_, *cached, *moved, earlier, constant, trees.recording, trees.manager, trees.way, live]
            things += [trees.before, trees.graph, trees.log, trees.way.mode, trees.way.compile_id, trees.function]
            before = []
            for number in range(120):
                if number == 20:
                    before = references_to(things)
                live.answer = (lambda: "no") if number % 4 == 0 else lambda: None
                live._settled = live._settled if number % 3 else []
                live.prepared.clear()
                for call, inputs in itertools.product(calls, (given_, moved, [])):
                    try:
                        call(list(inputs))
                    except IndexError:
                        self.assertIs(call, calls[2])
                trees.handed.clear()
                live.prepared.clear()
                trees.manager._current_node = trees.before
            after = references_to(things)
            self.assertEqual(after, before)
            self.assertGreater(trees.graph.launches, 100)

    def test_garbage(self):
        class Part(Live): ...

        given_ = some(1)
        for calls in (0, 3):
            trees = Trees({0: given_[0]}, some(1), live=Part([0]), after=deaths(some(1), 0))
            call = trees.entry(around=True, picks=[0])
            for _ in range(calls):
                call(list(given_))
            made = next(cell.cell_contents for cell in call.__closure__ if callable(cell.cell_contents))
            self.assertIsInstance(made, tensors.native.Entry)
            for part in (trees.graph, trees.live, trees.log, trees.function):
                part.entry = made
            parts = (trees, trees.graph, trees.live, trees.manager, trees.recording, trees.function, trees.log)
            watched = [weakref.ref(part) for part in parts]
            gc.collect()
            self.assertTrue(all(reference() is not None for reference in watched))
            del trees, call, made, part, parts
            gc.collect()
            self.assertEqual([reference() for reference in watched], [None] * len(watched))


@unittest.skipIf(tensors.load_native() is None, "not built for this torch")
class TestReplay(Case):
    """What it asks of its inputs."""

    def patched(self, order, **arguments):
        """Two of three inputs are patched; the graph holds their addresses."""
        given_ = some(3)
        theirs = given_ if order is None else [given_[index] for index in order]
        live = Live([2, 0])
        trees = Trees({1: theirs[1]}, some(1), live=live, **arguments)
        live._settled = [theirs[2].data_ptr(), theirs[0].data_ptr()]
        return trees, live, given_, theirs

    def test_patched_inputs(self):
        for order in (None, [2, 0, 1]):
            trees, live, given_, theirs = self.patched(order)
            call = trees.entry(order=order)
            addresses = list(live._settled)

            def replays(inputs, call=call, trees=trees):
                given_to = list(inputs)
                self.assertAreSame(call(given_to), trees.recording.own)
                self.assertEqual(given_to, [])

            def check_prepared(inputs, seen, live=live):
                ((found, addresses),) = live.prepared
                live.prepared.clear()
                self.assertAreSame(found, inputs)
                self.assertEqual(addresses, seen)

            replays(given_)
            replays(given_)
            self.assertEqual(live.prepared, [])
            live._pool.changes += 1
            replays(given_)
            check_prepared(theirs, addresses)
            for settled in (None, addresses[:1], addresses[::-1], []):
                live._settled = settled
                replays(given_)
                check_prepared(theirs, addresses)
            others = [t if t is theirs[1] else t.clone() for t in given_]
            their_others = others if order is None else [others[index] for index in order]
            replays(others)
            check_prepared(their_others, [their_others[2].data_ptr(), their_others[0].data_ptr()])
            replays(others)
            self.assertEqual((live.prepared, trees.graph.launches, trees.recording.calls), ([], 9, []))

    def test_patched_inputs_that_are_refused(self):
        def fail():
            raise Failed

        for order, refuses in itertools.product((None, [2, 0, 1], [1, 2, 0]), (True, False)):
            trees, live, given_, theirs = self.patched(order)
            call = trees.entry(order=order, around=True)
            live._settled, live.answer = None, (lambda: "why not") if refuses else fail
            inputs = list(given_)
            if refuses:
                self.assertIsNone(call(inputs))
            else:
                self.assertRaises(Failed, call, inputs)
            self.assertAreSame(live.prepared[0][0], theirs)
            self.check_untouched(trees, inputs, given_)
            self.assertEqual((trees.function.was_asked, trees.handed), (refuses, []))

    def test_patched_inputs_that_are_copied_for_a_call(self):
        for order, picks in itertools.product((None, [2, 0, 1]), (None, [1, 0])):
            trees, live, given_, theirs = self.patched(order)
            live._settled, live.temporary = None, {0: "a copy"}
            inputs = list(given_)
            found = trees.entry(order=order, kept=[0], picks=picks)(inputs)
            own = trees.recording.own
            self.assertAreSame(found, own if picks is None else [given_[0], own[0]])
            ((name, seen),) = trees.recording.calls
            self.assertAreSame(seen, theirs)
            self.assertEqual((name, inputs, trees.graph.launches), ("replay", [], 0))
            self.assertIs(trees.manager._current_node, trees.recording)

    def dying(self, order=None, further=0):
        """Two cached outputs of another recording are inputs around a static one, and have to be dead."""
        earlier, static = some(2 + further), torch.zeros(3)
        theirs = [earlier[0], static, earlier[1]]
        after = deaths(earlier, *range(2 + further))
        trees = Trees(dict(enumerate(theirs)), some(1), managed=[0, 2], after=after)
        trees.at_launch = []
        places = range(3) if order is None else inverse(order)
        del theirs

        def inputs():
            theirs = [earlier[0], static, earlier[1]]
            return [theirs[place] for place in places]

        return trees, earlier, inputs

    def test_inputs_that_died(self):
        for order, further in itertools.product((None, [2, 0, 1]), (0, 1)):
            trees, _, inputs = self.dying(order, further)
            call = trees.entry(order=order)
            seen = []
            for _ in range(4):
                given_ = inputs()
                trees.graph.at_launch = lambda given_=given_: seen.append(sum(value is None for value in given_))
                self.assertAreSame(call(given_), trees.recording.own)
                self.assertEqual(given_, [])
            # They are let go of and looked at; from then on they are looked at, and go with the others.
            self.assertEqual((seen, trees.recording.calls), ([2, 0, 0, 0], []))

    def test_inputs_that_are_held(self):
        holds = (
            lambda earlier, inputs: earlier[0],
            lambda earlier, inputs: earlier[1].view(2, 2),
            lambda earlier, inputs: earlier[1].untyped_storage()[:1],
            lambda earlier, inputs: earlier[0].detach(),
            lambda earlier, inputs: inputs.append(inputs[0]),  # once more among the inputs
            lambda earlier, inputs: earlier.__setitem__(1, earlier[1].detach()),  # another object lies there
        )
        for hold, before, order in itertools.product(holds[:4], (0, 1, 3), (None, [2, 0, 1])):
            trees, earlier, inputs = self.dying(order)
            call = trees.entry(order=order)
            for _ in range(before):
                call(inputs())
            given_ = inputs()
            holder = hold(earlier, given_)
            self.assertRaises(Failed, call, given_)
            self.assertEqual((trees.graph.launches, trees.recording.calls), (before, ["check"]))
            trees.recording.are_held = False  # by now
            self.assertAreSame(call(inputs()), trees.recording.own)
            del holder
            self.assertAreSame(call(inputs()), trees.recording.own)
            self.assertEqual((trees.graph.launches, trees.recording.calls), (before + 2, ["check"] * 2))
        for hold, before in itertools.product(holds[4:], (0, 2)):
            trees, earlier, inputs = self.dying()
            call = trees.entry()
            for _ in range(before):
                call(inputs())
            given_ = inputs()
            hold(earlier, given_)
            self.assertRaises(Failed, call, given_)
            del given_
            self.assertAreSame(call(inputs()), trees.recording.own)

    def test_inputs_that_are_kept(self):
        """The caller gets them, so that they are held; so is one that is no input."""
        for before in (0, 2):
            trees, earlier, inputs = self.dying(further=1)
            for _ in range(before):
                trees.entry()(inputs())
            self.assertRaises(Failed, trees.entry(kept=[0]), inputs())
            self.assertEqual(trees.graph.launches, before)
            trees.entry(kept=[1])(inputs())
            held = earlier[2]
            self.assertRaises(Failed, trees.entry(), inputs())
            self.assertEqual(trees.graph.launches, before + 1)
            del held
            trees.entry()(inputs())

    def test_inputs_that_are_held_while_they_are_prepared(self):
        trees, earlier, inputs = self.dying()
        live = Live([1])
        trees.way.replay = None
        recording = Recording({0: earlier[0], 2: earlier[1]}, some(1), live=live, after=deaths(earlier, 0, 1))
        trees.way.replay = steady.replay(recording, [0, 2], [NotImplemented])
        call = trees.entry()
        for _ in range(3):
            call(inputs())
        self.assertEqual((recording.graph.launches, len(live.prepared)), (3, 1))
        live.prepared.clear()
        live.answer = lambda: held.append(earlier[0])
        held, live._settled = [], None
        self.assertRaises(Failed, call, inputs())
        self.assertEqual((recording.graph.launches, recording.calls), (3, ["check"]))

    def test_outputs_that_have_to_be_dead_before(self):
        given_, earlier = some(1), some(2)
        trees = Trees({0: given_[0]}, some(1), before=deaths(earlier, 1, 0))
        call = trees.entry(around=True)
        held = earlier[0].view(2, 2)
        inputs = list(given_)
        self.assertIsNone(call(inputs))
        self.check_untouched(trees, inputs, given_)
        self.assertTrue(trees.function.was_asked)
        del held
        self.assertIsNotNone(call(inputs))
        earlier[1] = None  # now torch is asked
        self.assertIsNone(call(list(given_)))
        earlier.clear()
        self.assertIsNone(call(list(given_)))
        self.assertEqual(trees.graph.launches, 1)


if __name__ == "__main__":
    run_tests()
