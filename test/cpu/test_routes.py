"""Rules that decide how a live input is passed to a recorded graph."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from types import SimpleNamespace

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
    relocations = tuple(Relocation(0, 8 * i, index, 0) for i, index in enumerate(inputs))
    return Scan((), relocations, refused or {}, opaque, Counter())


class TestWhyNotPlaceholder(TestCase):
    def test_the_first_rule_that_holds_is_told(self):
        self.enterContext(FakeTensorMode())
        # A fake tensor cannot be sparse and on an absent GPU.
        sparse = SimpleNamespace(is_cuda=True, layout=torch.sparse_csr, get_device=lambda: 0)
        number = torch.empty(4, device="cuda:0", dtype=torch.complex64)
        for tensor, in_pool, why in (
            (torch.empty(4), False, "it is on cpu"),
            (torch.empty(0), True, "it is on cpu"),
            (torch.empty(4, device="cuda:1"), False, "it is on cuda:1"),
            (sparse, False, "its layout is torch.sparse_csr"),
            (number.conj(), False, "it is a conjugate view"),
            (number.conj().imag, False, "it is a negated view"),
            (torch.empty(4, 0, device="cuda:0"), False, "it has no elements"),
            (torch.empty(0, device="cuda:0"), True, "it has no elements"),
            (torch._efficientzerotensor((4,), device="cuda:0"), False, "it is a zero tensor without memory"),
            (number, True, "it is in the graph pool"),
            (number.conj().conj(), False, None),
            (torch.empty_strided((64, 8), (0, 1), device="cuda:0", dtype=torch.bool), False, None),
            (torch.empty_strided((64, 8), (100, 10), device="cuda:0"), False, None),
            (torch.empty((), device="cuda:0"), False, None),
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
        slots = Slots(frozenset({0}), frozenset({0, 2, 4}))
        unheld, unwritten = copy("no node holds its address"), copy("no node writes its slot")
        self.assertEqual(decide(scan, 5, (), slots), [TABLE, PATCH, TABLE, unheld, unwritten])
        self.assertEqual(decide(scan, 5, {3}, slots), [TABLE, PATCH, TABLE, PATCH, unwritten])
        hidden = dataclasses.replace(scan, opaque="a host node")
        self.assertEqual({d.route for d in decide(hidden, 5, (), slots)}, {Route.COPY})
        self.assertEqual([d.by_address for d in (TABLE, PATCH, unheld)], [True, True, False])


class TestFits(TestCase):
    @given(st.integers(0, 1 << 10), st.integers(0, 1 << 10))
    def test_as_aligned_as_recorded(self, address, recorded):
        as_aligned = all(address % (1 << p) == 0 for p in range(10) if recorded % (1 << p) == 0)
        expected = as_aligned and (recorded % 16 == 0 or address % 16 == recorded % 16)
        self.assertEqual(fits(address, recorded), expected)

    @given(st.integers(0, 1 << 10), st.integers(0, 1 << 10), st.integers(0, 1 << 10), st.integers(0, 1 << 8))
    def test_a_pointer_into_the_middle_stays_as_aligned(self, address, recorded, ahead, steps):
        aligned = math.gcd(recorded + ahead, 512)
        if fits(address, recorded, aligned):
            self.assertEqual((address + ahead) % aligned, 0)
            self.assertTrue(fits(address, recorded))
        self.assertTrue(fits(recorded + 512 * steps, recorded, aligned))

    def test_alignment_of_addresses_that_kernels_hold(self):
        kernel, fill = object.__new__(KernelNode), object.__new__(MemsetNode)
        held = ((0, 0, 0x10), (0, 0, 0), (0, 2, 0x30), (0, 7, 0), (1, 1, 0x100))
        relocations = tuple(Relocation(node, 0, index, addend) for node, index, addend in held)
        scan = Scan((kernel, fill), relocations, {}, None, Counter())
        self.assertEqual(alignments(scan, {0: 0x1010, 1: 0x1000, 2: 0x11D0, 3: 0}), {0: 32, 1: 1, 2: 512, 3: 1})


if __name__ == "__main__":
    run_tests()
