"""A fast replay in C++, with fakes for everything it goes through."""

import contextlib
import gc
import itertools
import sys
import unittest
import weakref
from unittest import mock

import torch
from fake_trees import MAY_CLONE, MODE, Failed, FakeFunction, Live, Plain, Recording, Trees, deaths, fail, ordered, some
from hypothesis import given, settings
from hypothesis import strategies as st
from test_own_memory import own_memory, storage
from torch._dynamo.mutation_guard import GenerationTracker
from torch._inductor import cudagraph_trees
from torch.testing._internal.common_utils import TestCase, run_tests

from pygraph_trees.native import binding
from pygraph_trees.trees.functions import fast_path
from pygraph_trees.trees.pools.collector import paused
from pygraph_trees.trees.pools.liveness import Deaths
from pygraph_trees.trees.recordings.replaying import native_replay

EXECUTION = cudagraph_trees.ExecutionState.EXECUTION
ORDERS = (None, [2, 0, 1])  # which is not its own inverse
BITS = (4,), (1,), 0, torch.int32  # a view that C++ does not make


class TestPython(TestCase):
    def test_without_the_part_in_cpp(self):
        with mock.patch.object(binding, "extension", None):
            self.assertIsNone(fast_path.entry(object(), order=[1, 0]))
            self.assertIsNone(native_replay(Recording({}, some(1)), (), [NotImplemented]))

    def test_one_call_has_the_turn(self):
        for kind in {fast_path.TreeState, fast_path._TreeState}:
            trees, one, other = kind(), [], []
            self.assertEqual((trees.is_taken, trees.has_turn(one)), (False, False))
            self.assertEqual((trees.take_turn(one), trees.take_turn(other)), (True, False))
            trees.end_turn(other)
            self.assertEqual((trees.is_taken, trees.has_turn(one), trees.has_turn(other)), (True, True, False))
            trees.end_turn(one)
            self.assertEqual((trees.is_taken, trees.take_turn(other)), (False, True))


@unittest.skipIf(binding.extension is None, "not built for this torch")
@mock.patch.object(cudagraph_trees.MarkStepBox, "mark_step_counter", 0)
class TestNative(TestCase):
    def assertAreSame(self, found, expected):
        self.assertEqual([id(one) for one in found], [id(one) for one in expected])

    def check_replays(self, call, given_, expected):
        inputs = list(given_)
        found = call(inputs)
        self.assertAreSame(found, expected)
        self.assertEqual((inputs, found is expected), ([], False))

    def check_untouched(self, trees, inputs, given_):
        self.assertAreSame(inputs, given_)
        self.assertEqual((trees.graph.launches, trees.log.counter.value, trees.recording.calls), (0, 0, []))
        self.assertIs(trees.manager._current_node, trees.before)
        self.assertIsNone(trees.manager.mode)

    def check_missed(self, trees, call, inputs, *searched, was_asked=False):
        """The call returns None and changes nothing; ``searched`` are the searches for candidates that it causes."""
        before = list(inputs) if isinstance(inputs, (list, tuple)) else []
        self.assertIsNone(call(inputs))
        self.check_untouched(trees, list(inputs) if before else [], before)
        self.assertEqual((trees.searched, trees.function.was_asked), (list(searched), was_asked))
        trees.function.was_asked = False

    def test_a_fast_call(self):
        for mode, pending in ((MODE.FORWARD, True), (MODE.BACKWARD, False), (MODE.INFERENCE, None)):
            given_, cached = some(2), some(3)
            trees = Trees(dict(enumerate(given_)), cached, mode=mode)
            call, m = trees.entry(), trees.manager
            for number in range(1, 4):
                asked, were, in_python = binding.extension.counts()
                if mode is MODE.BACKWARD:  # other code sees the gradients
                    self.assertEqual([t.data_ptr() for t in call(list(given_))], [t.data_ptr() for t in cached])
                else:
                    self.check_replays(call, given_, cached)
                state = (m.mode, m.compile_id, m._current_node, m.path_state, m.running_forwards_with_pending_backwards)
                self.assertAreSame(state, (mode, trees.compile_id, trees.recording, EXECUTION, pending))
                counts = m.current_gen, trees.graph.launches, trees.log.counter.value, *binding.extension.counts()
                self.assertEqual(counts, (GenerationTracker.generation, number, number, asked + 1, were + 1, in_python))
            self.assertEqual((trees.searched, trees.recording.calls, trees.function.was_asked), ([], [], False))

    @settings(max_examples=300, deadline=None)
    @given(st.data())
    def test_what_is_returned(self, data):
        """The entry returns a choice of outputs, kept inputs, views of both, and constants."""
        order = data.draw(st.none() | st.integers(1, 6).flatmap(lambda n: st.permutations(range(n))))
        given_ = some(4 if order is None else len(order))
        numbers, theirs = st.integers(0, len(given_) - 1), ordered(given_, order)
        kinds = [(torch.zeros(2, 4)[1], NotImplemented), (None, torch.zeros(4)), (None, 5), (None, None)]
        outputs = data.draw(st.lists(st.tuples(st.sampled_from(kinds), st.none() | numbers), max_size=5))
        returned = {i: (index, None) for i, (_, index) in enumerate(outputs) if index is not None}  # inputs
        cached = [kind[0] if index is None else None for kind, index in outputs]
        others = [kind[1] for kind, _ in outputs]
        fixed = {index: theirs[index] for index in data.draw(st.sets(numbers))}
        trees = Trees(fixed, cached, live=Live([], [], returned) if returned else None, others=others)
        trees.recording.outputs = [b if a is None else a for a, b in zip(cached, others, strict=True)]
        made = [theirs[returned[i][0]] if i in returned else one for i, one in enumerate(trees.recording.outputs)]
        spoilt = data.draw(st.sampled_from(["", "hook", "clear"]))  # torch has to make the outputs
        if spoilt == "hook":
            kinds[0][0].requires_grad_().register_hook(fail)
        elif spoilt == "clear":
            cached.clear()
        is_made = spoilt == "clear" or not outputs or any(one is NotImplemented for one in trees.recording.outputs)
        kept = data.draw(st.lists(numbers, max_size=3))
        constants = data.draw(st.lists(st.sampled_from([None, 7, "constant"]), max_size=2))
        row, views, seen = [*made, *ordered(given_, kept)], [], []
        viewable = [number for number, one in enumerate(row) if isinstance(one, torch.Tensor)]
        for number in data.draw(st.lists(st.sampled_from(viewable), max_size=3)) if viewable else ():
            sizes, strides = data.draw(st.sampled_from([((2, 2), (1, 1)), ((1,), (3,)), ((), ()), ((0,), (1,))]))
            start, offset = row[number].storage_offset(), data.draw(st.sampled_from([0, 1]))
            views.append((number, sizes, strides, offset - start))
            seen.append(row[number].as_strided(sizes, strides, offset))
        row += [*seen, *constants]
        picks = data.draw(st.none() | st.lists(st.integers(0, len(row) - 1), max_size=8)) if row else None
        call = trees.entry(order=order, kept=kept, picks=picks, constants=constants, views=views)
        for _ in range(3):
            inputs = list(given_)
            found = call(inputs)
            self.assertEqual((inputs, type(found)), ([], list if picks is None else tuple))
            wanted = made if picks is None else ordered(row, picks)
            for position, (one, other) in enumerate(zip(found, wanted, strict=True)):
                if one is not other:
                    self.assertIn(picks[position] - len(made) - len(kept), range(len(views)))
                    self.assertEqual(*[(t.shape, t.stride(), t.storage_offset(), t.data_ptr()) for t in (one, other)])
                    self.assertIs(one, found[picks.index(picks[position])])  # made once
        is_made |= spoilt == "hook" and any(one is kinds[0][0] for one in cached)
        expected = (3, [], ["own outputs"] * 3 * is_made)
        self.assertEqual((trees.graph.launches, trees.searched, trees.recording.calls), expected)

    def test_what_is_replayed_in_python(self):
        """Outputs that are inputs with another dtype, and inputs that are copied for one call or at each call."""
        for order, picks, why in itertools.product(ORDERS, (None, [1, 2]), ("views", "copied", "always")):
            given_, views = some(3), {0: (1, None), 1: (1, BITS)}
            live = Live([1], None, views) if why == "views" else Live([2], None)
            trees = Trees({}, some(2), live=live, in_python=why == "always")
            trees.live.temporary = {2: "a copy"} if why == "copied" else {}
            call = trees.entry(order=order, kept=[0], picks=picks)
            self.check_replays(call, given_, ordered([*trees.recording.outputs, given_[0]], picks or [0, 1]))
            self.assertAreSame(trees.recording.calls[0], ordered(given_, order))
            self.assertEqual((len(trees.recording.calls), trees.graph.launches), (1, 0))
            self.assertIs(trees.manager._current_node, trees.recording)

    def test_python_is_given_own_memory_at_the_end_of_the_inputs(self):
        """Whether it prepares or replays. A refused call has its inputs back, in the caller's order."""
        for order, in_python in itertools.product(ORDERS, (False, True)):
            given_, own = some(3), own_memory(storage(0), storage(1, allocation=1), takes=3)
            live = Live([1, 3, 4], None, {0: (3, None), 1: (4, None)})
            trees = Trees({}, [None] * 2, live=live, own=own, others=some(2), in_python=in_python)
            trees.replayer.own, call = own.native, trees.entry(order=order)
            live.answer = lambda: "why not"
            self.check_missed(trees, call, given_)
            live.answer = lambda: None
            outputs, memory = call(given := list(given_)), [own.native.item(number) for number in range(2)]
            self.assertEqual((given, len(outputs), trees.graph.launches), ([], 2, 1 - in_python))
            seen = [ids for ids, _ in live.prepared] + [[id(one) for one in given] for given in trees.recording.calls]
            self.assertEqual(seen[1:], [[id(one) for one in (*ordered(given_, order), *memory)]] * (1 + in_python))

    def test_when_nothing_can_be_replayed(self):
        for owner, name, value in (
            ("replayer", "manager", lambda: None),
            ("replayer", "manager", Plain),
            ("manager", "graph", None),
            ("function", "is_replayed", False),
            ("function", "replayer", None),
        ):
            with self.subTest(owner=owner, name=name, value=value):
                trees = Trees({}, some(1))
                call = trees.entry(around=True, order=[1, 0], kept=[1], picks=[0, 1])
                setattr(getattr(trees, owner), name, value)
                self.check_missed(trees, call, some(2), was_asked=True)

    def test_a_function_of_integers(self):
        """The entry for the values of its integers replays it. If there is none, nothing is replayed."""
        for order in ORDERS:
            x, outputs, calls = torch.ones(2), some(2), []
            trees, first = Trees({}, some(1)), [3, x, 5]

            def replay(inputs, calls=calls, outputs=outputs):
                calls.append(list(inputs))
                inputs.clear()
                return list(outputs)

            index = ordered(range(3), order).index
            trees.function.integers = (index(0), index(2))
            trees.function.by_values = {(3, 5): replay, (4, 5): lambda inputs: None}
            call = trees.entry(order=order, kept=[1], picks=[2, 0], around=True)
            self.check_replays(call, first, (x, outputs[0]))
            self.assertAreSame(calls.pop(), ordered(first, order))
            for given_ in ([4, x, 5], [6, x, 5], [3, x, x]):
                self.check_missed(trees, call, given_, was_asked=True)
            trees.function.by_values[3, 5] = fail
            self.assertRaises(Failed, call, list(first))
            trees.function.integers = (7,)
            self.check_missed(trees, call, first, was_asked=True)
            trees.function.is_replayed = False
            self.check_missed(trees, call, first, was_asked=True)

    def test_another_thread_records_when_the_launch_ends(self):
        """The collector, which is off during the launch, stays off until the recording is made."""
        trees = Trees({}, some(1), live=Live([0], None))
        call, recording = trees.entry(), paused()
        trees.graph.at_launch = recording.__enter__  # as another thread that runs during the launch does
        self.assertIsNotNone(call(some(1)))
        self.assertFalse(gc.isenabled())
        recording.__exit__(None, None, None)
        self.assertTrue(gc.isenabled())

    def test_a_call_beside_another_one(self):
        """Another call has the turn: one in Python, or one in C++ that a hook or a finalizer interrupted.

        The turn is given back whatever happens.
        """
        trees = Trees({}, some(1), live=Live([0], None))
        call, given_, manager = trees.entry(), some(1), trees.manager
        manager.take_turn(other := [])
        self.check_missed(trees, call, given_)
        manager.end_turn(other)
        inner, seen = some(1), []

        def interrupt():
            inputs = list(inner)
            seen.append((manager.is_taken, call(inputs), len(inputs)))

        # As a garbage collection does during the launch, or while Python prepares addresses.
        for owner, name in ((trees.graph, "at_launch"), (trees.live, "answer")):
            for hook in (interrupt, fail, lambda: None):
                trees.live.settle(None)
                setattr(owner, name, hook)
                if hook is fail:
                    self.assertRaises(Failed, call, list(given_))
                else:
                    self.assertIsNotNone(call(list(given_)))
                self.assertFalse(manager.is_taken)
        self.assertEqual((seen, trees.graph.launches), ([(True, None, 1)] * 2, 5))

    def test_inputs_are_released_once_it_is_anybodys_turn(self):
        trees, seen, given_ = Trees({}, some(1)), [], some(1)
        weakref.finalize(given_[0], lambda: seen.append(trees.manager.is_taken))
        self.assertIsNotNone(trees.entry()(given_))
        self.assertEqual((seen, given_), ([False], []))

    def test_inputs_that_are_not_as_expected(self):
        a, b = some(2)
        subclass = type("List", (list,), {})([a, b])
        for inputs in ((a, b), [a], [a, b, a], [], [a, 3], [a, None], [a, torch._neg_view(b)], 3, subclass):
            trees = Trees({0: b, 1: a}, some(1))
            self.check_missed(trees, trees.entry(order=[1, 0], picks=[0]), inputs)
        for arguments, fixed in (({"kept": [5]}, {}), ({}, {5: a})):  # the number of inputs is unknown
            trees = Trees(fixed, some(1))
            self.check_missed(trees, trees.entry(**arguments), [a])
        for partitions in ([a], [a, a], []):
            trees = Trees({}, some(1))
            call = trees.entry(around=True)
            trees.partitions[:] = partitions
            self.check_missed(trees, call, [])

    def test_when_a_step_begins(self):
        generation = GenerationTracker.generation
        steps = [(0, generation, False, False), (0, generation - 1, False, True), (0, generation - 1, True, False)]
        steps += [(-3, generation, True, True), (-3, -3, False, False)]  # the user marked the step
        # Whether outputs may be cloned: not in this torch, no, yes, and never noted.
        for step, begins, clones in itertools.product(steps, (None, False, True), (None, False, True, fail)):
            marked, current, pending, expected = step
            cudagraph_trees.MarkStepBox.mark_step_counter = marked
            with self.subTest(step=step, begins=begins), mock.patch.object(fast_path, "MAY_CLONE", clones is not None):
                trees = Trees({}, some(1))
                trees.put(trees.candidates(trees.native, begins=begins))
                trees.manager.current_gen = current
                trees.manager.running_forwards_with_pending_backwards = pending
                if clones is not fail:
                    trees.manager.has_live_user_visible_output_cloning = clones is not False
                elif MAY_CLONE:
                    del trees.manager.has_live_user_visible_output_cloning
                call = trees.entry()
                if begins not in (None, expected):
                    self.check_missed(trees, call, [], (7, expected))
                elif clones is fail and expected:
                    self.assertRaises(AttributeError, call, [])
                else:
                    self.check_replays(call, [], trees.recording.outputs)
                    self.assertEqual(trees.manager.current_gen, marked or generation)
                    self.assertEqual(trees.manager.ended, bool(clones and expected))

    def test_references(self):
        given_, cached, earlier, constants = some(3), some(2), some(1), [Plain()]
        moved = [t.clone() for t in given_]
        for order, returned in itertools.product(ORDERS, ({}, {1: (0, None)})):
            live = Live([2], None, returned)
            trees = Trees({1: ordered(given_, order)[1]}, cached, live=live, before=deaths(earlier, 0), managed=[0])
            more = {"constants": constants, "views": [(0, (2,), (1,), 1), (2, (1,), (1,), 0)]}
            calls = [trees.entry(order=order, kept=[1], picks=picks, **more) for picks in (None, range(6), [9])]
            things = [*given_, *cached, *moved, *constants, *vars(trees).values(), earlier]
            counted = []
            for number in range(100):
                live.answer = (lambda: "no") if number % 4 == 0 else lambda: None
                for call, inputs in itertools.product(calls, (given_, moved, [])):
                    with contextlib.suppress(IndexError):  # of the last call
                        call(list(inputs))
                    if number % 3 == 0:
                        live.settle(None)
                    del live.prepared[:], trees.searched[:]
                trees.manager._current_node = trees.before
                if number in (12, 96):  # of the same kind
                    counted.append([sys.getrefcount(thing) for thing in things])
            self.assertEqual(*counted)
            self.assertGreater(trees.graph.launches, 100)

    def test_garbage(self):
        for calls in (0, 3):
            trees = Trees({}, some(1), live=Live([0], None), after=deaths(some(1), 0))
            trees.entry = entry = fast_path.entry(trees.function, runner=(trees.partitions, 3), picks=[0])
            trees.partitions[:] = [3]
            trees.after = trees.recording.deaths_after
            for part in (trees.live, trees.graph, trees.log, trees.after, trees.before, trees.function):
                part.entry = entry
            for _ in range(calls):
                trees.manager._current_node = trees.before
                entry(some(1))
            self.assertEqual(trees.graph.launches, calls)
            kinds = Plain, FakeFunction, type(trees.manager), Recording, Live, Deaths
            watched = [weakref.ref(part) for part in vars(trees).values() if isinstance(part, kinds)]
            self.assertEqual(len(watched), 10)
            del trees, entry, part
            gc.collect()
            self.assertEqual([reference() for reference in watched], [None] * len(watched))

    def test_where_inputs_lie(self):
        for order in ORDERS:
            given_ = some(3)
            theirs, others = ordered(given_, order), [t.clone() for t in given_]
            addresses = [theirs[2].data_ptr(), theirs[0].data_ptr()]
            trees = Trees({1: theirs[1]}, some(1), live=Live([2, 0], None))
            call, live, (asked, *were) = trees.entry(order=order), trees.live, binding.extension.counts()
            self.check_missed(trees, call, others)
            self.check_missed(trees, trees.entry(order=order, around=True, kept=[0], picks=[0]), others, was_asked=True)
            self.assertEqual((binding.extension.counts(), live.prepared), ((asked + 2, *were), []))
            live.answer = lambda: "why not"
            self.check_missed(trees, call, given_)
            live.answer, inputs = fail, list(given_)
            self.assertRaises(Failed, call, inputs)
            self.check_untouched(trees, inputs, given_)
            live.answer = lambda: None
            others[1 if order is None else order[1]] = theirs[1]
            cases = [(addresses, 3, given_, False), (addresses, 4, given_, True), (addresses, 4, given_, False)]
            cases += [(settled, 4, given_, True) for settled in (None, addresses[::-1])]
            for settled, changes, inputs, is_prepared in [*cases, (addresses, 4, others, True)]:
                live.settle(settled)
                live.pool_changes.value = changes
                live.prepared.clear()
                self.check_replays(call, inputs, trees.recording.outputs)
                self.assertEqual(len(live.prepared), is_prepared)
                taken = ordered(inputs, order)
                for found in live.prepared:
                    self.assertEqual(found, ([id(t) for t in taken], [taken[2].data_ptr(), taken[0].data_ptr()]))
            self.check_replays(call, others, trees.recording.outputs)
            self.assertEqual((len(live.prepared), trees.graph.launches, trees.recording.calls), (1, 7, []))

    def dying(self, order=None, **recording):
        """Two of another recording's three cached outputs are inputs, and all three must be dead."""
        earlier, static = some(3), torch.zeros(3)
        fixed, after = {0: earlier[0], 2: earlier[1]}, deaths(earlier, 0, 2, 1)
        trees = Trees(fixed, some(1), managed=[0, 2], after=after, **recording)
        back = [0, 1, 2] if order is None else [order.index(number) for number in range(3)]
        return trees, earlier, lambda: ordered([earlier[0], static, earlier[1]], back)

    def check_held(self, trees, call, given_):
        """The slow path gets inputs with the same memory, whatever was released."""
        addresses, launches = [t.data_ptr() for t in given_], trees.graph.launches
        self.assertIsNone(call(given_))
        self.assertEqual(([t.data_ptr() for t in given_], trees.graph.launches), (addresses, launches))

    def test_inputs_that_died_or_are_held(self):
        holds = [lambda e: e[0], lambda e: e[1].view(2, 2), lambda e: e[1].untyped_storage()[:1]]
        holds += [lambda e: e[0].detach(), lambda e: e[2]]  # which is not an input
        for hold, before, order in itertools.product(holds, (0, 1, 3), ORDERS):
            (trees, earlier, inputs), given_ = self.dying(order), []
            call, seen = trees.entry(order=order), []
            for _ in range(before):
                given_ = inputs()
                trees.graph.at_launch = lambda given_=given_, seen=seen: seen.append(given_.count(None))
                self.assertIsNotNone(call(given_))
            self.assertEqual((seen, given_), ([2, 0, 0][:before], []))
            holder = hold(earlier)
            self.check_held(trees, call, inputs())
            self.assertEqual(trees.recording.calls, ["borrowed"] * 2)
            self.check_held(trees, call, inputs())
            del holder
            self.assertIsNotNone(call(inputs()))
            self.assertEqual(trees.graph.launches, before + 1)

    def test_inputs_that_are_held_by_the_call(self):
        for before in (0, 2):
            trees, earlier, inputs = self.dying()
            call = trees.entry()
            self.assertEqual([len(call(inputs())) for _ in range(before)], [1] * before)
            self.check_held(trees, trees.entry(kept=[0]), inputs())
            self.check_held(trees, call, [*inputs(), earlier[0]])  # an input twice
            held = inputs()
            earlier[1] = earlier[1].detach()  # another tensor takes its place; ``held`` keeps the given one alive
            self.check_held(trees, call, list(held))
            self.assertEqual(trees.graph.launches, before)
            self.assertIsNotNone(call(held))  # the input dies
            self.assertIsNotNone(trees.entry(kept=[1])(inputs()))
            given_, old = inputs(), earlier[1]
            holder = earlier[1] = some(1)[0]  # which is not an input
            self.check_held(trees, call, given_)
            del old, holder

    def test_inputs_that_hold_others(self):
        trees, earlier, inputs = self.dying()
        call = trees.entry()
        for number in range(1, 5):
            self.assertIsNotNone(call([earlier[0].view(2, 2), *inputs()[1:]]))
            held = earlier[0].view(2, 2)
            self.check_held(trees, call, [held, *inputs()[1:]])
            del held
            self.assertEqual(trees.graph.launches, number)

    def test_outputs_that_have_to_be_dead_before(self):
        given_, earlier = some(1), some(2)
        trees = Trees({}, some(1), before=deaths(earlier, 1, 0))
        call, held = trees.entry(around=True), earlier[0].view(2, 2)
        self.check_missed(trees, call, given_, was_asked=True)
        del held
        self.assertIsNotNone(call(list(given_)))
        for cached in ([earlier[0], None], []):  # so torch is asked
            earlier[:] = cached
            self.assertIsNone(call(list(given_)))
        self.assertEqual(trees.graph.launches, 1)

    def test_if_python_replays_it_may_check_which_tensors_died(self):
        """With torch 2.15, Python checks this after it has made the copies. Until then an input may be alive."""
        for late, why in itertools.product((False, True), ("plain", "copied", "always", "views")):
            earlier, static = some(1), torch.zeros(1)
            views = {0: (1, BITS)} if why == "views" else {}
            live = Live([1], None, views) if why in ("copied", "views") else None
            with mock.patch.object(fast_path, "CHECKS_LATE", late):
                after, in_python = deaths(earlier, 0), why == "always"
                trees = Trees({0: earlier[0]}, some(1), managed=[0], live=live, after=after, in_python=in_python)
            if why == "copied":
                live.temporary = {1: "a copy"}
            call, held = trees.entry(), earlier[0].view(2, 2)
            if late and why != "plain":
                self.assertIsNotNone(call([earlier[0], static]))
                self.assertEqual(trees.recording.calls, [[None, static]])
            else:
                self.check_held(trees, call, [earlier[0], static])
                self.assertEqual(trees.recording.calls, ["borrowed"])
            del held

    def test_an_input_that_is_taken_after_it_was_seen_to_die(self):
        """It is taken while Python prepares addresses, or while torch is asked which outputs are dead."""
        live, before, held = Live([1], None), Deaths([([None], [lambda: None], 0, 0)], fail), []
        for asked in ({"live": live}, {"before": before}):
            live.answer = take = mock.Mock(return_value=None)
            before.ask = lambda take=take: not take()
            trees, earlier, inputs = self.dying(**asked)
            call = trees.entry()
            for _ in range(3):
                self.assertIsNotNone(call(inputs()))
            live.settle(None)
            take.side_effect = lambda earlier=earlier: held.append(earlier[0])
            self.check_held(trees, call, inputs())
            self.assertEqual((trees.graph.launches, len(held)), (3, 1))
            held.clear()


if __name__ == "__main__":
    run_tests()
