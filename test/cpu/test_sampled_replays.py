"""Some replays are sampled to choose a route, and none after the decision."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

sys.path[:0] = [str(Path(__file__).resolve().parents[2]), str(Path(__file__).resolve().parent)]

import torch
from test_fast_path import Trees as FakeTrees
from test_live_inputs import LiveInputsTestCase, at
from test_patcher import requires_cpp
from torch.testing._internal.common_utils import run_tests

from pygraph_trees.indirection.addresses import Addresses
from pygraph_trees.indirection.route_rule import SAMPLES
from pygraph_trees.indirection.sampler import EVERY


class TestLiveInputs(LiveInputsTestCase):
    """Kernels are set in Python."""

    def sampled(self, wanted: int, *, can_choose: bool = True) -> tuple[Any, Any, list[Any], list[Any]]:
        """Live inputs of 3 kernels, two sets of inputs, and the samples, ``wanted`` at most."""
        sets = [[at(0), at(0), at(0)] for _ in range(2)]
        sets[1][2] = sets[0][2]
        live, _ = self.choose(*sets[0])
        graph = self.capture(lambda found: [self.api.make_kernel([*found, n]) for n in range(3)], live)
        samples: list[Any] = []

        def sample(moved: Any, set_nodes: int, set_calls: int, names: Any) -> bool:
            self.assertEqual(live.addresses._seen, [t.data_ptr() for t in self.given])  # after the graph was patched
            samples.append((list(moved), set_nodes, len(list(names(moved)))))
            return len(samples) < wanted

        self.replays = 0
        sampler: Any = SimpleNamespace(can_choose=lambda *_: can_choose, sample=sample)
        sampler.is_due = lambda: self.replays >= EVERY // 2 * (len(samples) + 1)
        live.sampler = sampler
        self.given = sets[0]
        live.set_up(graph)
        live.finish()
        return live, graph, sets, samples

    def replay(self, live: Any, graph: Any, sets: Sequence[Any], count: int) -> None:
        for number in range(count):
            self.given = sets[(number + 1) % 2]
            self.replays += 1
            self.assertEqual(self.call(live, graph, *self.given)[0][:3], [t.data_ptr() for t in self.given])

    def test_replays_with_new_addresses_are_sampled_until_no_more_are_wanted(self) -> None:
        live, graph, sets, samples = self.sampled(5)
        self.replay(live, graph, sets, 20 * EVERY)
        self.assertEqual(samples, [([0, 1], 3, 3)] * 5)
        self.assertIsNone(live.addresses.sampler)

    def test_replays_that_change_nothing_are_not_sampled(self) -> None:
        live, graph, sets, samples = self.sampled(5)
        self.replay(live, graph, [sets[0], sets[0]], 4 * EVERY)
        self.assertEqual(samples, [])

    def test_nothing_is_sampled_if_no_table_can_pay(self) -> None:
        live, graph, sets, samples = self.sampled(5, can_choose=False)
        self.replay(live, graph, sets, 2 * EVERY)
        self.assertEqual((samples, live.addresses.sampler), ([], None))

    def test_live_inputs_that_are_sampled_are_freed_without_the_collector(self) -> None:
        live, graph, sets, _ = self.sampled(5)
        self.replay(live, graph, sets, 3)
        live.addresses.sampler.sample = None  # this test's function refers to them
        gone = weakref.ref(live)
        gc.collect()
        gc.disable()
        self.addCleanup(gc.enable)
        del live, graph
        self.assertIsNone(gone())


@requires_cpp
class TestLiveInputsNative(TestLiveInputs):
    """Kernels are set in C++, which leaves a few replays to Python."""

    native = True

    def test_a_fast_replay_asks_nobody_after_the_decision(self) -> None:
        live, graph, sets, samples = self.sampled(SAMPLES)
        self.replay(live, graph, sets, 4)
        trees = FakeTrees({}, [torch.zeros(1)], live=live)
        entry = trees.entry(order=())

        def replays(count: int) -> None:
            for number in range(count):
                self.given = sets[(number + 1) % 2]
                self.replays += 1
                self.assertEqual(len(entry(list(self.given))), 1)
                self.assertEqual(graph.launch()[0][:3], [t.data_ptr() for t in self.given])

        replays((SAMPLES + 2) * EVERY)
        self.assertEqual((len(samples), live.addresses.sampler), (SAMPLES, None))
        python = mock.Mock(side_effect=AssertionError("C++ does it"))
        with mock.patch.object(Addresses, "prepare", python):
            replays(4 * EVERY)
        self.assertEqual(trees.searched, [])


if __name__ == "__main__":
    run_tests()
