"""Replays with new addresses are counted until a recording's route is chosen; afterwards they call no Python."""

from __future__ import annotations

import gc
import itertools
import weakref
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from test_fast_path import Trees as FakeTrees
from test_live_inputs import LiveInputsTestCase, at
from test_patcher import requires_cpp
from torch.testing._internal.common_utils import run_tests

from pygraph_trees.indirection.addresses import Addresses
from pygraph_trees.indirection.route_rule import REPLAYS

OFTEN = (1, 4, 8, 10**9)  # replays after which the address of each input changes


class TestCountedReplays(LiveInputsTestCase):
    """Kernels are set in Python."""

    def begin_counting(self, *, steps: int = 0, may_choose: bool = True) -> Any:
        """Live inputs of 3 kernels whose chooser takes so many steps after its choice; ``asked`` notes each."""
        self.asked: list[tuple[int, list[int], int]] = []  # after which replay, the inputs that change, kernels
        self.replays, self.sets = 0, [[at(0) for _ in OFTEN] for _ in range(2)]

        def go_on(changed: list[int], names: Any) -> bool:
            self.assertEqual(live.addresses._seen, [t.data_ptr() for t in self.given])  # it is patched by now
            self.asked.append((self.replays, changed, len(names(changed))))
            return len(self.asked) <= steps

        self.given = self.sets[0]
        live, _ = self.choose(*self.given)
        assert live is not None
        self.graph = self.capture(lambda found: [self.api.make_kernel([*found, n]) for n in range(3)], live)
        live.chooser = SimpleNamespace(may_choose=lambda *_: may_choose, go_on=go_on)  # type: ignore[assignment]
        live.set_up(self.graph)
        live.finish()
        return live

    def replayer(self, live: Any) -> Any:
        return lambda inputs: self.call(live, self.graph, *inputs)

    def replay(self, call: Any, count: int) -> None:
        for _ in range(count):
            self.replays += 1
            self.given = [self.sets[self.replays // often % 2][i] for i, often in enumerate(OFTEN)]
            call(list(self.given))
            self.assertEqual(self.graph.launch()[0][:-1], [t.data_ptr() for t in self.given])

    def test_the_chooser_is_asked_once_for_the_inputs_that_change_in_a_quarter_of_replays(self) -> None:
        live = self.begin_counting()
        self.replay(self.replayer(live), 5 * REPLAYS)
        self.assertEqual(self.asked, [(REPLAYS, [0, 1], 3)])
        self.assertIsNone(live.addresses.chooser)

    def test_a_build_takes_a_step_in_many_replays_until_it_ends(self) -> None:
        live = self.begin_counting(steps=3)
        self.replay(self.replayer(live), 8 * REPLAYS)
        self.assertEqual([replay for replay, *_ in self.asked], [n * REPLAYS for n in range(1, 5)])

    def test_replays_that_change_nothing_do_not_count(self) -> None:
        live = self.begin_counting()
        call = self.replayer(live)
        for _ in range(4 * REPLAYS):
            call(list(self.given))
        self.replay(call, REPLAYS - 1)
        self.assertEqual(self.asked, [])
        self.replay(call, 1)
        self.assertEqual(len(self.asked), 1)

    def test_nothing_is_counted_if_no_table_can_pay(self) -> None:
        live = self.begin_counting(may_choose=False)
        self.replay(self.replayer(live), 2 * REPLAYS)
        self.assertEqual((self.asked, live.addresses.chooser), ([], None))

    def test_live_inputs_are_freed_without_the_collector(self) -> None:
        live = self.begin_counting()
        live.addresses.chooser.go_on = lambda *_: True  # this test's function refers to them
        self.replay(self.replayer(live), REPLAYS)
        gone = weakref.ref(live)
        gc.collect()
        gc.disable()
        self.addCleanup(gc.enable)
        del live
        self.assertIsNone(gone())


@requires_cpp
class TestCountedReplaysNative(TestCountedReplays):
    """Fast replays are counted in C++, which leaves a few of them to Python."""

    native = True

    def replayer(self, live: Any) -> Any:
        entry = FakeTrees({}, [torch.zeros(1)], live=live).entry(order=())
        return lambda inputs: self.assertEqual(len(entry(inputs)), 1)

    def test_python_is_called_for_new_addresses_and_to_choose(self) -> None:
        live = self.begin_counting(steps=2)
        call = self.replayer(live)
        for given in itertools.product(*zip(*self.sets, strict=True)):  # all addresses are known to fit
            live.addresses.prepare(given)
        counts, prepare = live.addresses.native, Addresses.prepare
        counts.countdown, python = REPLAYS, list[int]()

        def counted(*given: Any) -> Any:
            python.append(self.replays)
            return prepare(*given)

        with mock.patch.object(Addresses, "prepare", counted):
            self.replay(call, 8 * REPLAYS)
        self.assertEqual(python, [n * REPLAYS for n in range(1, 4)])
        self.assertEqual((len(self.asked), counts.countdown), (3, 0))


if __name__ == "__main__":
    run_tests()
