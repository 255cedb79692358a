"""Which outputs get own memory, and when; an output that outlives its step is one that was moved."""

from __future__ import annotations

import contextlib
import unittest
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import torch
from bare_manager import bare_manager
from fake_trees import LIMITS, Plain
from test_allocations import COPIED, FIRST, LIBRARY, SECOND, addresses, captured, function, generated
from torch._inductor.cudagraph_utils import PlaceholderInfo, WrappedFunction
from torch.testing._internal.common_utils import TestCase, run_tests

from pygraph_trees.indirection.routes import Decision, Route
from pygraph_trees.native import binding
from pygraph_trees.outputs import policy
from pygraph_trees.outputs.allocations import Block
from pygraph_trees.outputs.own_memory import OwnMemory
from pygraph_trees.trees.managers import input_rules
from pygraph_trees.trees.managers.manager import Manager
from pygraph_trees.trees.managers.steps import Upstream

X = torch.arange(4.0)


class _OnCpu(OwnMemory):
    def __init__(self, blocks, storages, device, counters, **facts):
        super().__init__(blocks, storages, torch.device("cpu"), counters, **facts)


def many(count):
    made = "".join(f"    buf{n} = empty_strided_cuda((4,), (1,), torch.float32)\n" for n in range(count))
    return generated(f"def call(args):\n{made}    return ({''.join(f'buf{n}, ' for n in range(count))})")


@unittest.skipIf(binding.extension is None, "not built for this torch")
class TestPolicy(TestCase):
    def setUp(self):
        super().setUp()
        self.enterContext(mock.patch.object(policy, "OwnMemory", _OnCpu))
        self.again, self.path = [], []
        self.manager = bare_manager()
        self.manager.reclaiming = Plain(record_again=lambda id_, why, newest: self.again.append(id_))
        self.policy, self.functions = self.manager.output_policy, self.manager.ids_to_funcs

    def add(self, model):
        """Adds a function that was not warmed up; returns its id."""
        id_, names = len(self.functions), (PlaceholderInfo("x", None, [], None),)
        self.functions[id_] = WrappedFunction(model, [], id_, (), names, (0,), **LIMITS)
        return id_

    def warm_up(self, model, x=X):
        id_ = self.add(model)
        with self.policy.watched(self.manager, id_, [x]) as found:
            outputs = model([x])
        found(outputs, lambda address: True)
        self.path.append(model)
        return id_

    def outlive(self, *outputs, steps=1):
        """These outputs are alive when a step ends."""
        for _ in range(steps):
            for id_, number in outputs:
                self.functions[id_].model.log.output_moved(number, 16)
            self.policy.moved(self.manager, self.path)

    def call(self, id_, times=1):
        """Returns the blocks of the last call. After five calls whose outputs are dead, their memory is kept."""
        for _ in range(times):
            with self.policy.call(self.manager, id_, inputs := [X]):
                own = getattr(self.functions[id_], "own", None)
                self.nbytes = [value.untyped_storage().nbytes() for value in inputs[1:]]
        self.assertEqual(len(self.nbytes), 0 if own is None else len(own))
        return [] if own is None else list(own.blocks)

    def item(self, id_):
        """The memory that is kept for a function's first block."""
        return self.functions[id_].own.native.item(0)

    def recorded(self, id_, *refused, outputs=None, pool_bytes=0):
        """Notes a recording; ``refused``: the inputs that it copies, ``outputs``: those on own memory."""
        own = self.functions[id_].own
        indices = range(own.takes, own.takes + len(own))
        outputs = {index: (index, None) for index in indices} if outputs is None else outputs
        decisions = {n: Decision(Route.COPY, "?") if n in refused else Decision(Route.PATCH, None) for n in indices}
        live = Plain(decisions=decisions, outputs=outputs) if outputs else None
        node = Plain(own=own, live=live, wrapped_function=self.functions[id_])
        self.policy.recorded(self.manager, node, pool_bytes)

    def test_outputs_of_inference_have_own_memory_after_the_warm_up(self):
        """Those that its code allocates, if it is the graph's only partition and has no collective."""
        id_ = self.warm_up(model := function())
        self.assertEqual(self.call(id_), [FIRST, SECOND])
        wrapped = self.functions[id_]
        self.assertEqual(wrapped.mutated_input_idxs, (0, 1, 2))
        self.assertEqual([p.name for p in wrapped.placeholders], ["x", "output 0", "output 1"])
        with captured(), self.policy.call(self.manager, id_, inputs := [X]):
            given = inputs[1:]
            self.assertEqual(addresses(*model(inputs)[:2]), addresses(*given))
        added = function()
        added.dispatch.add(of_integers=False)
        for other in (added, function(mode="forward"), function(partitions=2), function(has_collective=True)):
            self.assertEqual(self.call(self.warm_up(other)), [])
        self.assertEqual(self.functions[1].mutated_input_idxs, (0,))

    def test_all_that_outlived_a_step_follow_one_that_outlived_two(self):
        """In the functions from its own on, which are recorded again anyway: a forward and its backward together."""
        early, forward, backward = (self.warm_up(function(mode=m)) for m in ("backward", "forward", "backward"))
        self.manager._candidates["known"] = {}
        self.outlive((early, 0), (forward, 1), (backward, 0), (backward, 2))
        self.assertEqual((self.policy.changes_next, self.manager._candidates), (False, {"known": {}}))
        with self.policy.call(self.manager, forward, inputs := [X]):
            self.outlive((forward, 1))
            state = self.policy.changes_next, self.manager._candidates, len(inputs), self.again
            self.assertEqual(state, (True, {}, 1, []))  # this call goes on without memory
        calls = [self.call(id_) for id_ in (early, forward, backward)]
        self.assertEqual((calls, sorted(self.again)), ([[], [SECOND], [FIRST]], [forward, backward]))
        self.outlive()
        self.assertFalse(self.policy.changes_next)
        self.assertEqual([self.functions[id_].model.outputs.changes for id_ in (early, forward, backward)], [0, 1, 1])

    def test_outputs_change_three_times_and_the_last_time_all_that_the_program_sees(self):
        cases = ("forward", 4, [1, 2, 4]), ("forward", None, [1, 2, 3]), ("backward", None, [1, 2, 5])
        for mode, inside, counts in (*cases, ("inference", None, [1, 2, 5])):
            del self.again[:], self.path[:]
            id_ = self.warm_up(function(many(5), mode=mode, partitions=2))
            self.functions[id_].model.first_inside = inside
            for number, count in enumerate([*counts, counts[-1]]):
                self.outlive((id_, number), steps=2)
                self.assertEqual(len(self.call(id_)), count)
            self.outlive((id_, 4), steps=2)
            self.assertEqual((len(self.call(id_)), len(self.again)), (counts[-1], 3))

    def test_an_output_that_cannot_be_given_by_address_is_copied_and_otherwise_stays_in_the_pool(self):
        id_ = self.warm_up(model := function())
        earlier, model.refused = self.functions[id_], {0: "its own", 1: "hidden"}
        self.recorded(id_)
        self.assertEqual((self.call(id_), self.again), ([FIRST, SECOND], []))
        self.recorded(id_, 1)
        self.assertEqual((self.call(id_), model.refused), ([COPIED, SECOND], {0: "its own"}))
        now, self.functions[id_] = self.functions[id_], earlier
        self.recorded(id_, 1)  # a recording with the earlier memory
        self.functions[id_] = now
        self.assertEqual((self.call(id_), self.again), ([COPIED, SECOND], [id_]))
        self.recorded(id_, outputs={0: (1, None)})  # a library allocated the other one where a buffer had been
        self.assertEqual(self.call(id_), [COPIED, Block((1,), None)])
        self.recorded(id_, 1)
        self.outlive((id_, 0), steps=3)
        self.assertEqual((self.call(id_), len(self.again)), ([Block((1,), None)], 3))
        self.recorded(id_, outputs={})  # no input is given by address
        self.assertEqual((self.call(id_), self.functions[id_].mutated_input_idxs), ([], (0,)))

    def test_which_storages_qualify(self):
        """Outputs in one storage are one block, also in a library's. Inputs do not. A collective needs copies."""
        cases = (0, False, [FIRST]), (2, False, []), (4, False, [LIBRARY]), (0, True, [COPIED])
        for number, has_collective, expected in cases:
            id_ = self.warm_up(function(mode="backward", has_collective=has_collective))
            self.outlive((id_, number), steps=2)
            self.assertEqual((self.call(id_), self.again), (expected, [id_] * len(expected)))
            del self.again[:], self.path[:]
        code = "def call(args):\n    return (torch.ones(4),)"  # given a tangent without memory
        id_ = self.warm_up(function(generated(code), mode="backward"), torch._efficientzerotensor(4))
        self.outlive((id_, 0), steps=2)
        self.assertEqual(self.call(id_), [COPIED])

    def test_without_memory_own_memory_is_released_and_a_call_tries_once_more(self):
        held, failing = self.warm_up(function()), self.add(function())
        self.call(held, times=5)
        self.assertIsNotNone(self.item(held))
        take = mock.Mock(side_effect=[torch.OutOfMemoryError, [X], *[torch.OutOfMemoryError] * 2])
        self.functions[failing] = Plain(model=function(), own=Plain(native=mock.Mock(take=take), blocks=()))
        with self.policy.call(self.manager, failing, inputs := [X]):
            self.assertEqual((len(inputs), self.item(held)), (2, None))
        with self.assertRaises(torch.OutOfMemoryError), self.policy.call(self.manager, failing, [X]):
            self.fail("it is called")

    def test_kept_memory_is_limited_by_the_pools_bytes(self):
        """Functions that were used last keep it; the one that was used last always does."""
        ids = [self.warm_up(function()) for _ in range(3)]
        for id_ in (2, 0, 1):
            self.call(id_, times=5)
        self.assertEqual(self.policy.held_bytes(self.manager), 72)
        for pool_bytes, held in ((48, [24, 24, 24]), (47, [24, 24, 0]), (0, [0, 24, 0])):
            self.recorded(ids[0], pool_bytes=pool_bytes)
            self.assertEqual([self.functions[id_].own.native.held_bytes for id_ in ids], held)

    def test_a_function_of_integers_has_own_memory_for_each_set_of_values(self):
        """Unless its allocations differ: then outputs are in the pool until they are copied."""
        code = (
            "def call(args):\n    x, = args\n    args.clear()\n"
            "    scratch = x.numel() > 6 and empty_strided_cuda((4,), (1,), torch.float32)\n"
            "    buf = empty_strided_cuda((x.numel(),), (1,), torch.float32)\n    return (buf.copy_(x),)"
        )
        ids = [self.warm_up(model := function(generated(code)))]
        model.dispatch.add(of_integers=True)
        ids += [self.warm_up(model, torch.arange(count)) for count in (6.0, 7.0)]
        self.assertEqual([self.call(id_) for id_ in ids], [[FIRST], [FIRST], []])
        self.recorded(ids[1], 1)
        calls = [(self.call(id_), self.nbytes) for id_ in ids]
        self.assertEqual((calls, self.again), ([([COPIED], [nbytes]) for nbytes in (16, 24, 28)], ids))

    def test_a_manager_watches_the_first_warm_up_and_releases_memory_with_the_function(self):
        """Not of code that Inductor did not generate, or of functions that use no addresses or do not keep outputs."""
        self.enterContext(mock.patch.object(Manager, "_pool", mock.Mock(nbytes=lambda: 0, holds=lambda address: False)))
        self.enterContext(mock.patch.object(Manager, "_warming_up", lambda *_: contextlib.nullcontext()))
        self.enterContext(mock.patch.object(Upstream, "run_eager", lambda _, x, id_: self.functions[id_].model(x)))
        kept, others = function(), [function(lambda inputs: [inputs[0] + 1]), function(outputs="upstream"), function()]
        self.enterContext(mock.patch.object(input_rules, "uses_addresses", lambda model: model is not others[-1]))
        for model in (kept, *others):
            self.manager.run_eager([X], id_ := self.add(model))
            expected = [FIRST, SECOND] if model is kept else []
            self.assertEqual((self.call(id_, times=5), self.policy.knows(id_)), (expected, model is kept))
        self.manager.reclaiming.forget, own = mock.Mock(), self.functions[0].own
        self.manager.run_eager([X], 0)
        self.assertIs(self.functions[0].own, own)
        self.assertIsNotNone(self.item(0))
        self.manager.forget(kept)
        self.assertIsNone(self.item(0))

    def test_the_manager_of_another_thread_changes_the_outputs(self):
        """A call that is under way uses the memory that it has. This manager follows once it moves an output."""
        id_ = self.warm_up(model := function())
        with captured(), self.policy.call(self.manager, id_, inputs := [X]):
            given, model.outputs.blocks = inputs[1:], model.outputs.blocks[:1]
            self.assertEqual(addresses(*model(inputs)[:2]), addresses(*given))
        self.assertEqual((self.call(id_), self.again), ([FIRST, SECOND], []))
        for _ in range(2):
            self.policy.moved(self.manager, self.path)
            self.assertEqual((self.call(id_), self.again), ([FIRST], [id_]))

    def test_own_memory_of_other_blocks_is_left_out_of_a_run(self):
        """The check of a recording may still have it."""
        id_ = self.warm_up(model := function())
        with captured(), self.policy.call(self.manager, id_, inputs := [X]):
            model.outputs.call.blocks = ()
            self.assertEqual(len(model(inputs)), len(function()([X])))

    def test_a_run_in_another_thread_is_not_watched(self):
        id_ = self.add(model := function())
        with self.policy.watched(self.manager, id_, [X]) as found:
            with ThreadPoolExecutor(1) as other:
                other.submit(model, [X]).result(60)
            outputs = model([X])
        found(outputs, lambda address: False)
        self.assertEqual(self.call(id_), [FIRST, SECOND])


if __name__ == "__main__":
    run_tests()
