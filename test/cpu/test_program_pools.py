"""Calls inside ``torch.cuda.use_mem_pool``: graphs are made and replayed outside of the pool, un-graphed code inside.

Torch's functions are replaced by a list of the pools that take the thread's allocations, and their counts of users.
"""

from __future__ import annotations

import threading
from collections import Counter
from types import SimpleNamespace
from unittest import mock

import torch
from fake_trees import replay_with, replaying
from test_trees import double, inference
from torch.testing._internal.common_utils import TestCase, run_tests

from pygraph_trees.trees.functions.dispatch import Way
from pygraph_trees.trees.functions.function import Aligned, entered
from pygraph_trees.trees.pools import program_pools


class TestProgramPools(TestCase):
    def setUp(self):
        super().setUp()
        self.active, self.users = [], Counter()  # pools in torch's order
        memory, begins, ends = torch.cuda.memory, program_pools.begins(self.begin), program_pools.ends(self.end)
        for name, function, patched in (
            ("_cuda_beginAllocateCurrentThreadToPool", self.begin, begins),
            ("_cuda_endAllocateToPool", self.end, ends),
            ("_cuda_releasePool", self.release, self.release),
        ):
            self.enterContext(mock.patch.object(torch._C, name, function, create=True))
            self.enterContext(mock.patch.object(memory, name, patched))

    def begin(self, device, pool):
        self.users[pool] += 1
        self.active.append(pool)

    def end(self, device, pool):
        self.active.remove(pool)

    def release(self, device, pool):
        self.users[pool] -= 1

    def use(self, number):
        return torch.cuda.memory.use_mem_pool(SimpleNamespace(id=(0, number)), 0)

    def function(self):
        self.seen = []  # the pools in use, at each run

        def runs(kind):
            return lambda inputs: (self.seen.append((kind, *self.active)), double(inputs))[1]

        function = inference(runs("code"), indirection="auto")
        aligned = Aligned(function, (), ())
        self.enterContext(mock.patch("torch._inductor.compile_fx.get_input_idxs_to_check", lambda *_: []))
        return function, aligned, entered(function, runs("graph"), aligned)

    def test_graphs_are_made_outside_and_code_runs_inside(self):
        """Pools are used again in their order, with as many users, also after an error."""
        function, aligned, call = self.function()
        call([1])
        with self.use(1), self.use(2):
            self.assertEqual(call([1]), [2])
            function.dispatch.go(Way.UNGRAPHED, aligned)
            self.assertEqual(call([1]), [2])
            function.dispatch.go(Way.UNGRAPHED, lambda inputs: inputs[7])
            self.assertRaises(IndexError, call, [1])
            self.assertEqual((self.active, set(self.users.values())), ([(0, 1), (0, 2)], {1}))
        self.assertEqual(self.seen, [("graph",), ("graph",), ("code", (0, 1), (0, 2))])
        self.assertEqual((self.active, set(self.users.values()), program_pools._used), ([], {0}, {}))

    def test_replays_are_fast_outside(self):
        """Only calls of the thread that uses the pool leave it; C++ replays the others at once."""
        function, _, call = self.function()

        def replay(inputs, function_id):
            self.seen.append(("C++", *self.active))
            return [8]

        replay_with(function.dispatch, replaying(replay), 7)
        with self.use(1):
            self.assertEqual(call([1]), [8])
            self.seen.append(self.active.copy())
            with mock.patch.object(program_pools, "outside", side_effect=AssertionError):
                other = threading.Thread(target=call, args=([1],))
                other.start()
                other.join()
        self.assertEqual(call([1]), [8])
        self.assertEqual([seen for seen in self.seen if seen[0] != "graph"], [("C++",), [(0, 1)], ("C++",)])


if __name__ == "__main__":
    run_tests()
