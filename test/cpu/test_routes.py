"""Rules that decide how a live input is passed to a recorded graph."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.common_utils import TestCase, run_tests

from pygraph_trees.cuda.copy_nodes import MemsetNode
from pygraph_trees.cuda.graph_nodes import KernelNode
from pygraph_trees.indirection.relocations import Relocation, Scan
from pygraph_trees.indirection.routes import Decision, Route, Slots, alignments, decide, fits, why_not_placeholder

PATCH = Decision(Route.PATCH, None)
TABLE = Decision(Route.TABLE, None)


def copy(reason: str) -> Decision:
    return Decision(Route.COPY, reason)


def found(*inputs: int, refused: dict[int, str] | None = None, opaque: str | None = None) -> Scan:
    """A scan with one relocation for each input."""
    return Scan(
        (), tuple(Relocation(0, 8 * i, index, 0) for i, index in enumerate(inputs)), refused or {}, opaque, Counter()
    )


class TestWhyNotPlaceholder(TestCase):
    def setUp(self):
        super().setUp()
        self.enterContext(FakeTensorMode())

    def test_plain_tensors_may_have_placeholders(self):
        for size, stride in (((64, 8), (8, 1)), ((64, 8), (1, 64)), ((64, 8), (0, 1)), ((64, 8), (100, 10)), ((), ())):
            for dtype in (torch.float32, torch.bool, torch.complex64, torch.float8_e4m3fn):
                tensor = torch.empty_strided(size, stride, dtype=dtype, device="cuda:1")
                self.assertIsNone(why_not_placeholder(tensor, 1, in_pool=False))

    def test_the_first_rule_that_holds_is_told(self):
        class OnGpu:  # a fake tensor cannot be sparse and on an absent GPU
            is_cuda = True
            layout = torch.sparse_csr

            def get_device(self):
                return 0

        number = torch.empty(4, device="cuda:0", dtype=torch.complex64)
        for tensor, in_pool, why in (
            (torch.empty(4), False, "it is on cpu"),
            (torch.empty(0), True, "it is on cpu"),
            (torch.empty(4, device="cuda:1"), False, "it is on cuda:1"),
            (OnGpu(), False, "its layout is torch.sparse_csr"),
            (number.conj(), False, "it is a conjugate view"),
            (number.conj().imag, False, "it is a negated view"),
            (torch.empty(4, 0, device="cuda:0"), False, "it has no elements"),
            (torch.empty(0, device="cuda:0"), True, "it has no elements"),
            (torch._efficientzerotensor((4,), device="cuda:0"), False, "it is a tensor of zeros without memory"),
            (number, True, "it lies in the graph pool"),
            (number.conj().conj(), False, None),
        ):
            self.assertEqual(why_not_placeholder(tensor, 0, in_pool), why)


class TestDecide(TestCase):
    def test_inputs_that_no_node_holds_or_that_are_refused_are_copied(self):
        unheld, hidden = copy("no node holds its address"), copy("a host node may hide its address")
        array, collective = copy("its address is in a host array"), copy("a collective reads it")
        two = {0: array.reason, 2: collective.reason}
        for scan, count, passed, expected in (
            (found(0, 1, 1), 2, (), [PATCH, PATCH]),
            (found(1), 3, {2}, [unheld, PATCH, PATCH]),
            (found(0, 1, refused=two), 3, {0, 2}, [array, PATCH, collective]),
            (
                found(0, refused={1: collective.reason}, opaque="a host node"),
                4,
                {3},
                [hidden, collective, hidden, hidden],
            ),
            (found(opaque="a host node"), 0, (), []),
        ):
            self.assertEqual(decide(scan, count, passed), expected)

    def test_inputs_that_all_kernels_read_through_slots_go_by_table(self):
        # Node 0 writes slots 0 to 3; kernels read slots 0, 2 and 4, and another node holds the addresses of 1 and 2.
        relocations = [(0, 0), (0, 1), (0, 2), (0, 3), (1, 1), (1, 2)]
        scan = Scan((), tuple(Relocation(node, 0, index, 0) for node, index in relocations), {}, None, Counter())
        slots = Slots(frozenset({0}), frozenset({0, 2, 4}))
        unheld, unwritten = copy("no node holds its address"), copy("no node writes its slot")
        self.assertEqual(decide(scan, 5, (), slots), [TABLE, PATCH, TABLE, unheld, unwritten])
        self.assertEqual(decide(scan, 5, {3}, slots), [TABLE, PATCH, TABLE, PATCH, unwritten])
        hidden = dataclasses.replace(scan, opaque="a host node")
        self.assertEqual({d.route for d in decide(hidden, 5, (), slots)}, {Route.COPY})
        self.assertEqual([d.by_address for d in (TABLE, PATCH, unheld)], [True, True, False])

    @given(st.sets(st.integers(0, 5)), st.sets(st.integers(0, 5)), st.sets(st.integers(0, 5)), st.booleans())
    def test_only_what_is_known_is_patched(self, held, refused, passed, hidden):
        scan = found(*sorted(held), refused=dict.fromkeys(refused, "of that"), opaque="a host node" if hidden else None)
        decisions = decide(scan, 6, passed)
        patched = {i for i, decision in enumerate(decisions) if decision.route is Route.PATCH}
        self.assertEqual(patched, set() if hidden else (held | passed) - refused)
        self.assertEqual([d.reason is None for d in decisions], [i in patched for i in range(6)])


class TestFits(TestCase):
    @given(st.integers(0, 1 << 10), st.integers(0, 1 << 10))
    def test_as_aligned_as_recorded(self, address, recorded):
        as_aligned = all(address % (1 << p) == 0 for p in range(10) if recorded % (1 << p) == 0)
        expected = as_aligned and (recorded % 16 == 0 or address % 16 == recorded % 16)
        self.assertEqual(fits(address, recorded), expected)

    @given(st.integers(1, 1 << 40), st.integers(0, 1 << 8), st.sampled_from([1 << p for p in range(10)]))
    def test_a_whole_stride_of_512_away_always_fits(self, recorded, steps, aligned):
        self.assertTrue(fits(recorded + 512 * steps, recorded, aligned))

    @given(st.integers(0, 1 << 10), st.integers(0, 1 << 10), st.integers(0, 1 << 10))
    def test_a_pointer_into_the_middle_stays_as_aligned(self, address, recorded, ahead):
        aligned = math.gcd(recorded + ahead, 512)
        if fits(address, recorded, aligned):
            self.assertEqual((address + ahead) % aligned, 0)
            self.assertTrue(fits(address, recorded))

    def test_alignment_of_addresses_that_kernels_hold(self):
        kernel, fill = object.__new__(KernelNode), object.__new__(MemsetNode)
        relocations = (
            Relocation(0, 0, 0, 0x10),
            Relocation(0, 8, 0, 0),
            Relocation(0, 16, 2, 0x30),
            Relocation(0, 24, 7, 0),
            Relocation(1, 0, 1, 0x100),
        )
        scan = Scan((kernel, fill), relocations, {}, None, Counter())
        self.assertEqual(alignments(scan, {0: 0x1010, 1: 0x1000, 2: 0x11D0, 3: 0}), {0: 32, 1: 1, 2: 512, 3: 1})


if __name__ == "__main__":
    run_tests()
