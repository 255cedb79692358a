"""The routes of inputs: the rules for one input, the choice of a table, the steps to it, and replays until then."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import math
import weakref
from collections import Counter
from collections.abc import Collection, Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from fake_trees import Plain
from test_fast_path import Trees as FakeTrees
from test_launches import FakeAutotuner
from test_live_inputs import LiveInputsTestCase, at
from test_patcher import requires_cpp
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.common_utils import TestCase, run_tests

from pygraph_trees.cuda.copy_nodes import MemsetNode
from pygraph_trees.cuda.graph_nodes import KernelNode
from pygraph_trees.indirection import route_rule
from pygraph_trees.indirection.addresses import Addresses
from pygraph_trees.indirection.relocations import Relocation, Scan
from pygraph_trees.indirection.route_rule import REPLAYS, RouteChooser, choose_route, chooser_for
from pygraph_trees.indirection.routes import Decision, Route, alignments, decide, fits, why_not_placeholder
from pygraph_trees.indirection.table import builds
from pygraph_trees.indirection.table import pointer_table as table
from pygraph_trees.indirection.table.pointer_table import Reader
from pygraph_trees.reasons import Reason
from pygraph_trees.report.log import FunctionLog


class TestRule(TestCase):
    def test_a_table_needs_16_kernels_and_4_inputs(self) -> None:
        for facts, text in (
            ((16, 4), ", until a table for 16 kernels that read 4 inputs is built"),
            ((15, 4), ": 15 kernels could read inputs from a table, fewer than 16"),
            ((16, 3), ": 3 inputs that a table could hold have changing addresses, fewer than 4"),
        ):
            self.assertEqual(str(choose_route(*facts)), f"by address{text}")


class TestChooser(TestCase):
    """A function whose 6 inputs are read by 20 kernels with variants and one without; a build takes 2 steps."""

    def setUp(self) -> None:
        super().setUp()
        self.is_built = True
        self.kernels: Sequence[str | None] = [*["kernel"] * 20, "other", None]
        inputs = frozenset((f"in_ptr{index}", index) for index in range(6))
        self.readers = {0: Reader(FakeAutotuner("kernel"), frozenset({"in_ptr0"}), inputs)}
        choices, of_functions, readers, taken = (weakref.WeakKeyDictionary[Any, Any]() for _ in range(4))
        self.enterContext(mock.patch.multiple(route_rule, _choices=choices, _waiting=weakref.WeakSet()))
        self.enterContext(mock.patch.multiple(builds, _builds=of_functions, go_on=self.build))
        self.enterContext(mock.patch.multiple(table, READERS=readers, TAKEN=taken))
        self.renew()

    def renew(self) -> None:
        self.steps, self.reasons = 2, list[str]()
        self.function = Plain(log=FunctionLog("f", None, "inference", 1, {}))
        table.READERS[self.function] = self.readers

    def build(self, function: Any) -> bool | None:
        self.steps -= 1
        if self.steps > 0:
            return None
        builds._builds[function] = None
        if self.is_built:
            table.TAKEN[function] = frozenset({0})
        return self.is_built

    def made(self) -> RouteChooser:
        """The chooser of a recording that was just made."""
        chooser = chooser_for(self.function, 0)
        assert chooser is not None
        chooser.ready = self.reasons.append
        return chooser

    def names(self, indices: Collection[int]) -> Sequence[str | None]:
        return self.kernels if indices else ()

    def steps_of(self, chooser: RouteChooser, most: int = 1000, changed: Collection[int] = range(5)) -> int:
        """Makes the choice and further steps until no more follow; returns their number."""
        return next((n for n in range(1, most) if not chooser.go_on(changed, self.names)), most)

    @property
    def choice(self) -> Reason | None:
        found = route_rule.choice_of(self.function, 0)
        return None if found is None else found.reason

    def test_a_table_is_chosen_and_built_and_recorded_once(self) -> None:
        chooser, log = self.made(), self.function.log
        self.assertTrue(chooser.may_choose(range(6), self.names) and log.is_choosing)
        self.assertTrue(chooser.go_on(range(5), self.names) and log.is_choosing)
        self.assertEqual((self.choice, log.awaits_table), (Reason.TABLE_AWAITED, True))
        self.assertEqual(self.steps_of(chooser), 2)
        self.assertFalse(log.is_choosing)
        self.assertEqual(self.reasons, [Reason.TABLE_BUILT()])
        route_rule.recorded(self.function, 0, reads_table=True)
        self.assertEqual((self.choice, self.function.log.awaits_table), (Reason.TABLE, False))
        self.assertEqual(self.function.log.route, "by table: 20 kernels read 5 inputs whose addresses change")
        self.assertIsNone(chooser_for(self.function, 0))

    def test_a_decision_against_a_table_is_final(self) -> None:
        for changed, kernels, reason in (
            (range(3), self.kernels, Reason.FEW_INPUTS),
            (range(3, 9), self.kernels, Reason.FEW_INPUTS),  # no kernel reads the last three in a table
            ((), self.kernels, Reason.FEW_INPUTS),  # addresses that seldom change
            (range(6), self.kernels[5:], Reason.FEW_KERNELS),
        ):
            self.renew()
            other = self.made()
            with mock.patch.object(self, "kernels", kernels):
                self.assertEqual(self.steps_of(self.made(), changed=changed), 1)
            self.assertEqual((self.choice, self.reasons), (reason, []))
            self.assertEqual((self.steps_of(other), self.choice), (1, reason))  # another recording takes it over
            # Recorded again it is patched at once, also if another size of the function has a table by then.
            table.TAKEN[self.function] = frozenset({0})
            self.assertIsNone(chooser_for(self.function, 0))
            self.assertFalse(route_rule.may_use_table(self.function, 0))
            self.assertTrue(route_rule.may_use_table(self.function, 1))

    def test_functions_wait_for_each_other_but_not_for_ever(self) -> None:
        """A function after another one in a step is recorded again with it."""
        chooser, other = self.made(), Plain()
        builds.begin(other)
        self.assertEqual((self.steps_of(chooser, most=20), self.reasons), (20, []))
        builds.give_up(other)
        self.assertEqual((self.steps_of(chooser), len(self.reasons)), (1, 1))
        self.renew()
        builds.begin(third := Plain())
        self.assertEqual(self.steps_of(self.made()), 2 + route_rule._PATIENCE)
        self.assertEqual((len(self.reasons), builds.is_over(third)), (1, False))

    def test_kernels_that_cannot_be_compiled_or_an_error_leave_inputs_patched(self) -> None:
        self.is_built = False
        self.assertEqual(self.steps_of(self.made()), 3)
        found = self.choice, self.reasons, self.function.log.awaits_table
        self.assertEqual(found, (Reason.TABLE_NOT_COMPILED, [], False))
        self.renew()
        with (
            mock.patch.object(builds, "begin", side_effect=RuntimeError("of the test")),
            self.assertLogs("pygraph_trees.indirection", "WARNING") as logs,
        ):
            self.assertEqual(self.steps_of(self.made()), 1)
        self.assertIn("of the test", logs.output[0])

    def test_a_recording_that_cannot_use_the_table_says_so_and_one_that_fails_leaves_it_for_good(self) -> None:
        self.steps_of(self.made())
        route_rule.recorded(self.function, 0, reads_table=False)
        self.assertEqual(self.function.log.route, "by address: a table is built, but this recording cannot use it")
        self.assertTrue(route_rule.may_use_table(self.function, 0))  # a recording elsewhere in the tree may
        route_rule.leave_table(self.function, 0, RuntimeError("of the {test}"))
        self.assertEqual(self.function.log.route, "by address: recording it with a table failed: of the {test}")
        self.assertEqual(table.taken_by_variants(self.function), frozenset())
        for sizes in (0, 1):
            self.assertIsNone(chooser_for(self.function, sizes))

    def test_nothing_is_counted_for_a_recording_that_no_table_can_pay_for(self) -> None:
        chooser = self.made()
        self.assertTrue(chooser.may_choose(range(6), self.names))
        self.function.log.is_choosing = False
        self.assertFalse(chooser.may_choose(range(3), self.names) or self.function.log.is_choosing)
        with mock.patch.object(self, "kernels", self.kernels[5:]):
            self.assertFalse(chooser.may_choose(range(6), self.names))
        with mock.patch.dict(table.READERS, {self.function: {}}):
            self.assertIsNone(chooser_for(self.function, 0))

    def test_a_chooser_does_not_keep_its_function(self) -> None:
        chooser, gone = self.made(), weakref.ref(self.function)
        del self.function
        self.assertIsNone(gone())
        self.assertFalse(chooser.go_on((), self.names) or chooser.may_choose(range(6), self.names))


PATCH = Decision(Route.PATCH, None)
TABLE = Decision(Route.TABLE, None)


def copy(reason: str) -> Decision:
    return Decision(Route.COPY, reason)


def found(*inputs: int, refused: dict[int, str] | None = None, opaque: str | None = None) -> Scan:
    """A scan with one relocation for each input."""
    relocations = tuple(Relocation(0, 8 * i, index, 0) for i, index in enumerate(inputs))
    return Scan((), relocations, refused or {}, opaque, Counter())


class TestWhyNotPlaceholder(TestCase):
    def test_the_first_rule_that_holds_is_told(self):
        self.enterContext(FakeTensorMode())
        # A fake tensor cannot be sparse and on an absent GPU.
        sparse = SimpleNamespace(is_cuda=True, layout=torch.sparse_csr, get_device=lambda: 0)
        number = torch.empty(4, device="cuda:0", dtype=torch.complex64)
        for tensor, in_pool, why in (
            (torch.empty(0), True, "it is on cpu"),
            (torch.empty(4, device="cuda:1"), False, "it is on cuda:1"),
            (sparse, False, "its layout is torch.sparse_csr"),
            (number.conj(), False, "it is a conjugate view"),
            (number.conj().imag, False, "it is a negated view"),
            (torch.empty(0, device="cuda:0"), True, "it has no elements"),
            (torch._efficientzerotensor((4,), device="cuda:0"), False, "it is a zero tensor without memory"),
            (number, True, "it is in the graph pool"),
            (number.conj().conj(), False, None),
            (torch.empty_strided((64, 8), (0, 1), device="cuda:0", dtype=torch.bool), False, None),
        ):
            self.assertEqual(why_not_placeholder(tensor, 0, in_pool), why)


class TestDecide(TestCase):
    def test_inputs_that_no_node_holds_or_that_are_refused_are_copied(self):
        unheld, hidden = copy("no node holds its address"), copy("a host node may hide its address")
        array, read = copy("its address is in a host array"), copy("a collective reads it")
        for scan, passed, expected in (
            (found(0, 1, 1), (), [PATCH, PATCH]),
            (found(1), {2}, [unheld, PATCH, PATCH]),
            (found(0, 1, refused={0: array.reason, 2: read.reason}), {0, 2}, [array, PATCH, read]),
            (found(0, refused={1: read.reason}, opaque="a host node"), {3}, [hidden, read, hidden, hidden]),
            (found(opaque="a host node"), (), []),
        ):
            self.assertEqual(decide(scan, len(expected), passed), expected)

    def test_inputs_that_all_kernels_read_through_slots_go_by_table(self):
        # Node 0 writes slots 0 to 3; kernels read slots 0, 2 and 4, and another node holds the addresses of 1 and 2.
        relocations = [(0, 0), (0, 1), (0, 2), (0, 3), (1, 1), (1, 2)]
        scan = Scan((), tuple(Relocation(node, 0, index, 0) for node, index in relocations), {}, None, Counter())
        slots = {0}, {0, 2, 4}
        unheld, unwritten = copy("no node holds its address"), copy("no node writes its slot")
        self.assertEqual(decide(scan, 5, (), *slots), [TABLE, PATCH, TABLE, unheld, unwritten])
        self.assertEqual(decide(scan, 5, {3}, *slots), [TABLE, PATCH, TABLE, PATCH, unwritten])
        hidden = dataclasses.replace(scan, opaque="a host node")
        self.assertEqual({d.route for d in decide(hidden, 5, (), *slots)}, {Route.COPY})
        self.assertEqual([d.by_address for d in (TABLE, PATCH, unheld)], [True, True, False])


ADDRESSES = sorted({number << power for number in (0, 1, 3) for power in range(11)})  # of all alignments


class TestFits(TestCase):
    def test_as_aligned_as_recorded(self):
        for address, recorded in itertools.product(ADDRESSES, repeat=2):
            as_aligned = all(address % (1 << p) == 0 for p in range(10) if recorded % (1 << p) == 0)
            expected = as_aligned and (recorded % 16 == 0 or address % 16 == recorded % 16)
            self.assertEqual(fits(address, recorded), expected, f"{address} for {recorded}")

    def test_a_pointer_into_the_middle_stays_as_aligned(self):
        for address, recorded, ahead in itertools.product(ADDRESSES, repeat=3):
            aligned = math.gcd(recorded + ahead, 512)
            as_aligned = fits(address, recorded) and (address + ahead) % aligned == 0
            self.assertEqual(fits(address, recorded, aligned), as_aligned, f"{address} for {recorded}, {ahead} ahead")

    def test_alignment_of_addresses_that_kernels_hold(self):
        kernel, fill = object.__new__(KernelNode), object.__new__(MemsetNode)
        held = ((0, 0, 0x10), (0, 0, 0), (0, 2, 0x30), (0, 7, 0), (1, 1, 0x100))
        relocations = tuple(Relocation(node, 0, index, addend) for node, index, addend in held)
        scan = Scan((kernel, fill), relocations, {}, None, Counter())
        self.assertEqual(alignments(scan, {0: 0x1010, 1: 0x1000, 2: 0x11D0, 3: 0}), {0: 32, 1: 1, 2: 512, 3: 1})


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
        self.replay(self.replayer(self.begin_counting(steps=3)), 8 * REPLAYS)
        self.assertEqual([replay for replay, *_ in self.asked], [n * REPLAYS for n in range(1, 5)])

    def test_replays_that_change_nothing_do_not_count(self) -> None:
        call = self.replayer(self.begin_counting())
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
        for inputs in itertools.product(*zip(*self.sets, strict=True)):  # all addresses are known to fit
            live.addresses.prepare(inputs)
        counts, prepare = live.addresses.native, Addresses.prepare
        counts.countdown, python = REPLAYS, list[int]()
        with mock.patch.object(Addresses, "prepare", lambda *given: python.append(self.replays) or prepare(*given)):
            self.replay(call, 8 * REPLAYS)
        self.assertEqual(python, [n * REPLAYS for n in range(1, 4)])
        self.assertEqual((len(self.asked), counts.countdown), (3, 0))


if __name__ == "__main__":
    run_tests()
