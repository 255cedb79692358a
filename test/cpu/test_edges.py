"""Edges in place of the captured chain: no interleaving that they allow changes a value, they keep the order of all
units in conflict, none is redundant, and a graph that cannot have them keeps its chain.
"""

from __future__ import annotations

import ctypes
import itertools
from dataclasses import dataclass, replace

from fake_calls import PROGRAMMATIC
from fake_driver import FakeApi
from fake_native import library
from hypothesis import given, settings
from hypothesis import strategies as st
from interleaving import is_right
from torch.testing._internal.common_utils import TestCase, run_tests

from pygraph_trees.cuda.driver import Driver
from pygraph_trees.cuda.edges import Dependencies, Edge
from pygraph_trees.edges.lanes import HOP_US, lane_edges, schedule
from pygraph_trees.edges.order import conflicts, missing, reduced
from pygraph_trees.edges.rewriting import Chain, GraphLost, NotReplaced
from pygraph_trees.edges.units import Access, Unit
from pygraph_trees.errors import NOT_FOUND, DriverError

EXAMPLES = settings(max_examples=150, deadline=None)
READ, ADD, REMOVE = "cuGraphGetEdges_v2", "cuGraphAddDependencies_v2", "cuGraphRemoveDependencies_v2"


def reads(*cells: int) -> tuple[Access, ...]:
    return tuple(Access(cell, cell + 1, False) for cell in cells)


def writes(*cells: int) -> tuple[Access, ...]:
    return tuple(Access(cell, cell + 1, True) for cell in cells)


@dataclass(frozen=True)
class Op:
    accesses: tuple[Access, ...]
    lane: int = 0
    nodes: int = 1
    side_by_side: bool = False  # its nodes have no edges in between, and one of them does everything
    barrier: bool = False
    early: bool = False  # a programmatic edge leads to it, if each side has one node for that


class Captured:
    """A chain of operations, captured on a fake driver."""

    def __init__(self, ops: list[Op]) -> None:
        self.api = FakeApi()
        self.graph = self.api.make_graph(*["KERNEL"] * sum(op.nodes for op in ops))
        self.dependencies, self.nodes = Dependencies(self.api), Driver(self.api).nodes(self.graph)
        nodes = iter(self.nodes)
        self.ops, self.effects, tails = [], {}, []
        for op in ops:
            own = tuple(itertools.islice(nodes, op.nodes))
            heads = own if op.side_by_side else own[:1]
            data = PROGRAMMATIC if op.early and len(heads) == len(tails) == 1 else 0
            self.api.connect(self.graph, ((a, b, data) for a in tails for b in heads))
            if not op.side_by_side:
                self.api.connect(self.graph, ((*pair, 0) for pair in itertools.pairwise(own)))
            tails = own if op.side_by_side else own[-1:]
            self.ops.append(Unit(own, op.accesses, op.barrier, op.lane))
            does = own[len(op.accesses) % len(own) :][:1] if op.side_by_side else own
            self.effects |= {node: op.accesses if node in does else () for node in own}
        self.edges = dict(self.api.edges(self.graph))

    def chain(self) -> Chain:
        return Chain(self.dependencies, self.graph, self.nodes, self.ops)

    def is_right(self, seeds: range) -> bool:
        return is_right(self.effects, self.api.edges(self.graph), seeds)


starts, counts = st.integers(0, 20), st.integers(1, 6)
accesses = st.builds(lambda start, count, write: Access(start, start + count, write), starts, counts, st.booleans())
seldom = st.sampled_from([False] * 7 + [True])
operations = st.builds(
    Op, st.lists(accesses, max_size=3).map(tuple), st.integers(0, 3), st.integers(1, 3), st.booleans(), seldom, seldom
)
programs = st.lists(operations, min_size=1, max_size=12)
times = st.lists(st.integers(0, 8).map(lambda n: n / 2), min_size=12, max_size=12)


def in_conflict(one: Unit, other: Unit) -> bool:
    pairs = itertools.product(one.accesses, other.accesses)
    clash = any((a.write or b.write) and a.start < b.end and b.start < a.end for a, b in pairs)
    return clash or one.barrier or other.barrier


def reachable(edges, start) -> set:
    """All that paths lead to, found without the project's code."""
    found, todo = set(), [start]
    while todo:
        here = todo.pop()
        new = {after for before, after in edges if before == here} - found
        found |= new
        todo += new
    return found


class TestReplacing(TestCase):
    @EXAMPLES
    @given(programs, times)
    def test_no_interleaving_changes_a_value(self, ops, times):
        captured = Captured(ops)
        chain = captured.chain()
        edges = lane_edges(chain.units, chain.needs, times[: len(chain.units)])
        chain.replace(edges)
        self.assertTrue(captured.is_right(range(8)))
        # All nodes of two operations in conflict are in order, or the two are one unit, which keeps its edges.
        present = captured.api.edges(captured.graph)
        unit = {node: i for i, one in enumerate(chain.units) for node in one.nodes}
        after = {node: reachable(present, node) for node in unit}
        for one, other in itertools.combinations(captured.ops, 2):
            if unit[one.nodes[0]] != unit[other.nodes[0]] and in_conflict(one, other):
                self.assertTrue(all({*other.nodes} <= after[node] for node in one.nodes), (one, other))
        inside = {nodes: data for nodes, data in captured.edges.items() if unit[nodes[0]] == unit[nodes[1]]}
        self.assertEqual({nodes: data for nodes, data in present.items() if data or nodes in inside}, inside)
        # No edge is redundant, and the units of each lane are in order.
        for earlier, later in edges:
            self.assertNotIn(later, reachable({*edges} - {(earlier, later)}, earlier))
        for one, other in itertools.combinations(range(len(chain.units)), 2):
            if chain.units[one].lane == chain.units[other].lane:
                self.assertTrue(other in reachable(edges, one) or one in reachable(edges, other), (one, other))
        chain.restore()
        self.assertEqual(captured.api.edges(captured.graph), captured.edges)

    def test_a_unit_keeps_its_lane_first(self):
        """The last unit waits for unit 1, too, so that unit 2 starts first; but it is in the lane of unit 0."""
        captured = Captured([Op(writes(1)), Op(writes(2), 1), Op(reads(1), 2), Op(reads(1, 2))])
        chain, (a, b, c, d) = captured.chain(), captured.nodes
        chain.replace(lane_edges(chain.units, chain.needs, [1.0, 9.0, 1.0, 1.0]))
        self.assertEqual([*captured.api.edges(captured.graph)], [(a, d), (a, c), (b, d)])

    def test_units_that_may_start_early_are_one(self):
        """So are the units in between."""
        early = Op(reads(9), early=True)
        captured = Captured([Op(writes(1)), Op(writes(2)), early, Op(writes(3), barrier=True), replace(early, lane=1)])
        captured.api.connect(captured.graph, [(captured.nodes[1], captured.nodes[4], PROGRAMMATIC)])
        joined = Unit(tuple(captured.nodes[1:]), writes(2) + reads(9) + writes(3) + reads(9), True)
        self.assertEqual(captured.chain().units, [captured.ops[0], joined])

    @EXAMPLES
    @given(programs, st.sampled_from([(READ, 0), (READ, 1), (READ, 2), (ADD, 0), (REMOVE, 0)]), st.integers(0, 99))
    def test_a_graph_that_cannot_have_the_edges_keeps_its_chain(self, ops, failing, number):
        needed = reduced(Captured(ops).chain().needs)
        at = number % max(1, len(needed))
        for kind in ("error", "interrupt", "cycle", "twice", "lost", "early", "dropped") if needed else ():
            captured = Captured(ops)
            chain, api, pairs = captured.chain(), captured.api, list(needed)
            if kind in ("error", "interrupt"):
                api.changed_before_failure = number % 5
                api.fail(*failing, raises=KeyboardInterrupt() if kind == "interrupt" else None)
            elif kind in ("lost", "early"):
                api.misadds = kind
            elif kind == "dropped":
                del pairs[at]
            else:
                pairs.append(needed[at][::-1] if kind == "cycle" else needed[at])
            self.assertRaises(KeyboardInterrupt if kind == "interrupt" else NotReplaced, chain.replace, pairs)
            self.assertEqual(api.edges(captured.graph), captured.edges)

    def test_a_chain_that_cannot_be_restored_is_reported(self):
        for call, after in ((READ, 4), (ADD, 1), (READ, 6), (None, 0)):
            captured = Captured([Op(writes(1), nodes=2), Op(reads(1))])
            chain = captured.chain()
            if call is None:
                captured.dependencies.remove(captured.graph, [Edge(*captured.ops[0].nodes)])
            else:
                captured.api.misadds = "lost"
                captured.api.fail(call, after)
            self.assertRaises(GraphLost, chain.replace, [(0, 1)])

    def test_only_a_chain_of_all_nodes_is_changed(self):
        captured = Captured([Op(writes(1)), Op(writes(2)), Op(writes(3), nodes=2, side_by_side=True)])
        units = captured.ops
        for wrong in (units[:2], [*units, units[0]], [*units, Unit(())], units[::-1]):
            self.assertRaises(NotReplaced, Chain, captured.dependencies, captured.graph, captured.nodes, wrong)
        captured.dependencies.remove(captured.graph, [Edge(units[1].nodes[0], units[2].nodes[1])])
        self.assertRaises(NotReplaced, captured.chain)


class TestOrder(TestCase):
    @EXAMPLES
    @given(programs)
    def test_units_need_what_conflicts_imply_and_no_more(self, ops):
        units = [Unit((1,), op.accesses, op.barrier) for op in ops]
        needs = conflicts(units)
        clash = [sum(1 << i for i in range(j) if in_conflict(units[i], unit)) for j, unit in enumerate(units)]
        self.assertEqual([need & ~all_ for need, all_ in zip(needs, clash, strict=True)], [0] * len(units))
        self.assertEqual(missing(clash, reduced(needs)), [])

    @EXAMPLES
    @given(programs, times)
    def test_the_edges_allow_the_predicted_time(self, ops, times):
        units = [Unit((1,), op.accesses, op.barrier, op.lane) for op in ops]
        lanes, needs, ends = [unit.lane for unit in units], conflicts(units), {}
        order, us = schedule(reduced(needs), lanes, times[: len(units)])
        pairs = lane_edges(units, needs, times[: len(units)])
        for unit in order:
            ahead = [ends[a] + HOP_US * (lanes[a] != lanes[unit]) for a, later in pairs if later == unit]
            ends[unit] = times[unit] + max(ahead, default=0.0)
        self.assertEqual((max(ends.values()), len(ends)), (us, len(units)))

    def test_a_lane_starts_what_most_depends_on(self):
        """Unit 2 waits for unit 1, in another lane, and nothing waits for unit 0."""
        self.assertEqual(schedule([(1, 2)], [0, 0, 1], [4.0, 4.0, 4.0]), ([1, 0, 2], 4.0 + HOP_US + 4.0))

    def test_an_access_has_at_least_a_byte(self):
        self.assertRaisesRegex(ValueError, "from 0x10 ends at 0x10", Access, 16, 16, False)


class TestDependencies(TestCase):
    def test_edges_go_to_the_library_and_back_with_their_data(self):
        path = library()
        if path is None:
            self.skipTest("there is no C compiler")
        dependencies = Dependencies(ctypes.CDLL(str(path)))
        self.assertEqual(dependencies.read(1), [])
        edges = [Edge(2**40, 2**47 + 8), Edge(2**47 + 8, 3, PROGRAMMATIC), Edge(3, 4, 2**63)]
        dependencies.add(1, edges)
        self.assertEqual(dependencies.read(1), edges)
        self.assertEqual([edge.is_full for edge in edges], [True, False, False])
        self.assertRaisesRegex(DriverError, f"^{REMOVE} returned 1$", dependencies.remove, 1, edges[:2])
        dependencies.remove(1, edges)
        self.assertEqual(dependencies.read(1), [])

    def test_an_older_driver_lacks_the_calls(self):
        self.assertRaisesRegex(DriverError, f"^{READ} returned {NOT_FOUND}$", Dependencies(object()).read, 1)


if __name__ == "__main__":
    run_tests()
