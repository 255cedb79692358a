"""Edges in place of the captured chain: no interleaving that they allow changes a value, they keep the order of all
units in conflict, none is redundant, and a graph that cannot have them keeps its chain.
"""

from __future__ import annotations

import ctypes
import itertools
from dataclasses import dataclass, replace

from fake_driver import CUresult, FakeApi
from fake_edges import PROGRAMMATIC
from fake_native import library
from hypothesis import given, settings
from hypothesis import strategies as st
from interleaving import interleaved, serial
from torch.testing._internal.common_utils import TestCase, run_tests

from pygraph_trees.cuda.driver import Driver
from pygraph_trees.cuda.edges import Dependencies, Edge, EdgeKind
from pygraph_trees.edges.conflicts import conflicts
from pygraph_trees.edges.lanes import HOP_US, lane_edges, schedule
from pygraph_trees.edges.order import Edges, missing, reduced
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
    """An operation to capture."""

    accesses: tuple[Access, ...]
    lane: int = 0
    nodes: int = 1
    side_by_side: bool = False  # its nodes have no edges in between, and one of them does everything
    barrier: bool = False
    early: bool = False  # whether a programmatic edge leads to it, if each side has one node for that


class Captured:
    """A chain of operations, captured on a fake driver."""

    def __init__(self, ops: list[Op]) -> None:
        self.api = FakeApi()
        self.graph = self.api.make_graph(*["KERNEL"] * sum(op.nodes for op in ops))
        self.driver, self.dependencies = Driver(self.api), Dependencies(self.api)
        nodes = iter(self.driver.nodes(self.graph))
        self.ops, tails = [], []
        for op in ops:
            own = tuple(itertools.islice(nodes, op.nodes))
            heads = own if op.side_by_side else own[:1]
            data = PROGRAMMATIC if op.early and len(heads) == len(tails) == 1 else 0
            self.api.connect(self.graph, ((a, b, data) for a in tails for b in heads))
            if not op.side_by_side:
                self.api.connect(self.graph, ((*pair, 0) for pair in itertools.pairwise(own)))
            tails = own if op.side_by_side else own[-1:]
            self.ops.append(Unit(own, op.accesses, op.barrier, op.lane))
        self.edges = dict(self.api.edges(self.graph))
        self.effects = {
            node: op.accesses if not op.side_by_side or i == len(op.accesses) % op.nodes else ()
            for unit, op in zip(self.ops, ops, strict=True)
            for i, node in enumerate(unit.nodes)
        }

    def chain(self) -> Chain:
        return Chain(self.driver, self.dependencies, self.graph, self.ops)

    def is_right(self, seeds: range) -> bool:
        """Whether all nodes read in each interleaving what they read one after another, and memory ends as it does."""
        right = serial(self.effects)
        return all(interleaved(self.effects, self.api.edges(self.graph), seed) == right for seed in seeds)


accesses = st.builds(
    lambda start, count, write: Access(start, start + count, write),
    st.integers(0, 20),
    st.integers(1, 6),
    st.booleans(),
)
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
    """All that paths lead to from ``start``, found without the project's code."""
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
        self.check_order(captured, chain.units)
        self.check_edges(captured, chain.units, edges)
        captured.api.instantiate(captured.graph)
        chain.restore()
        self.assertEqual(captured.api.edges(captured.graph), captured.edges)

    def check_order(self, captured, units):
        """All nodes of two operations in conflict are in order, unless these are one unit, which keeps its edges."""
        present = captured.api.edges(captured.graph)
        unit = {node: i for i, one in enumerate(units) for node in one.nodes}
        follow = {node: reachable(present, node) for node in unit}
        for one, other in itertools.combinations(captured.ops, 2):
            if unit[one.nodes[0]] != unit[other.nodes[0]] and in_conflict(one, other):
                self.assertTrue(all({*other.nodes} <= follow[node] for node in one.nodes), (one, other))
        inside = {nodes: data for nodes, data in captured.edges.items() if unit[nodes[0]] == unit[nodes[1]]}
        self.assertEqual({nodes: present[nodes] for nodes in inside}, inside)
        self.assertFalse(any(data for nodes, data in present.items() if nodes not in inside))

    def check_edges(self, captured, units, edges):
        """No edge is redundant, each lane is in order, and each node's first successor is in its lane if any is."""
        for earlier, later in edges.pairs:
            self.assertNotIn(later, reachable({*edges.pairs} - {(earlier, later)}, earlier))
        for one, other in itertools.combinations(range(len(units)), 2):
            if units[one].lane == units[other].lane:
                is_ordered = other in reachable(edges.pairs, one) or one in reachable(edges.pairs, other)
                self.assertTrue(is_ordered, (one, other))
        lane = {node: unit.lane for unit in units for node in unit.nodes}
        added = list(captured.api.edges(captured.graph))
        for node in lane:
            same = [lane[after] == lane[node] for before, after in added if before == node]
            self.assertEqual(same, sorted(same, reverse=True))

    def test_only_needed_edges_stay(self):
        """Two towers of two units, and a last one that reads both."""
        ops = [Op(writes(1)), Op(reads(1) + writes(2)), Op(writes(3), 1), Op(reads(3) + writes(4), 1), Op(reads(2, 4))]
        captured = Captured(ops)
        chain = captured.chain()
        chain.replace(lane_edges(chain.units, chain.needs, [1.0] * 5))
        nodes = captured.driver.nodes(captured.graph)
        expected = [(0, 1), (2, 3), (1, 4), (3, 4)]
        self.assertEqual({*captured.api.edges(captured.graph)}, {(nodes[a], nodes[b]) for a, b in expected})

    def test_units_that_may_start_early_are_one(self):
        early = Op(reads(9), early=True)
        captured = Captured([Op(writes(1)), Op(writes(2)), early, replace(early, barrier=True), Op(writes(3))])
        units = captured.chain().units
        self.assertEqual([len(unit.nodes) for unit in units], [1, 3, 1])
        self.assertEqual(units[1].accesses, writes(2) + reads(9, 9))
        self.assertTrue(units[1].barrier)

    @EXAMPLES
    @given(programs, st.data())
    def test_a_graph_that_cannot_have_the_edges_keeps_its_chain(self, ops, data):
        captured = Captured(ops)
        chain = captured.chain()
        edges = lane_edges(chain.units, chain.needs, [1.0] * len(chain.units))
        kind = data.draw(st.sampled_from(["error", "interrupt", "cycle", "twice", "lost", "dropped"]))
        expected: type[BaseException] = NotReplaced
        if kind in ("error", "interrupt"):
            call, after = data.draw(st.sampled_from([(READ, 0), (READ, 1), (READ, 2), (ADD, 0), (REMOVE, 0)]))
            captured.api.changed_before_failure = data.draw(st.integers(0, 4))
            captured.api.fail(call, after, raises=KeyboardInterrupt() if kind == "interrupt" else None)
            expected = NotReplaced if kind == "error" else KeyboardInterrupt
            if len(chain.units) == 1 or not edges.pairs:
                return
        elif not (needed := reduced(chain.needs)):
            return
        elif kind == "cycle":
            edges = Edges((*needed, needed[0][::-1]))
        elif kind == "twice":
            edges = Edges((*needed, needed[0]))
        elif kind == "lost":
            edges, captured.api.loses_an_edge = Edges(tuple(needed)), True
        else:
            position = data.draw(st.integers(0, len(needed) - 1))
            edges = Edges((*needed[:position], *needed[position + 1 :]))
        with self.assertRaises(expected):
            chain.replace(edges)
        self.assertEqual(captured.api.edges(captured.graph), captured.edges)

    def test_a_chain_that_cannot_be_restored_is_reported(self):
        for call, after in ((READ, 3), (ADD, 1), (READ, 5)):
            captured = Captured([Op(writes(1)), Op(reads(1))])
            chain = captured.chain()
            captured.api.loses_an_edge = True
            captured.api.fail(call, after)
            with self.assertRaises(GraphLost):
                chain.replace(Edges(((0, 1),)))

    def test_only_a_chain_of_all_nodes_is_changed(self):
        captured = Captured([Op(writes(1)), Op(writes(2)), Op(writes(3), nodes=2, side_by_side=True)])
        units = captured.ops
        for wrong in (units[:2], [*units, units[0]], [*units, Unit(())], units[::-1]):
            with self.assertRaises(NotReplaced):
                Chain(captured.driver, captured.dependencies, captured.graph, wrong)
        captured.dependencies.remove(captured.graph, [Edge(units[1].nodes[0], units[2].nodes[1])])
        with self.assertRaises(NotReplaced):
            captured.chain()

    def test_edges_inside_a_unit_must_stay(self):
        captured = Captured([Op(writes(1), nodes=2), Op(reads(1))])
        chain = captured.chain()
        captured.dependencies.remove(captured.graph, [Edge(*captured.ops[0].nodes)])
        with self.assertRaisesRegex(GraphLost, "inside a unit"):
            chain.replace(Edges(((0, 1),)))


class TestMutations(TestCase):
    def check(self, ops, declared=None, needs=None):
        """The executor finds wrong values if edges come from what units declare, and none if from what they do."""
        for units, expected in ((ops, True), (declared or ops, False)):
            captured = Captured(units)
            chain = captured.chain()
            captured.effects = dict(zip(captured.effects, (op.accesses for op in ops), strict=True))
            chain.needs = chain.needs if expected or needs is None else needs
            chain.replace(Edges(tuple(reduced(chain.needs))))
            self.assertEqual(captured.is_right(range(200)), expected)

    def test_an_edge_that_is_dropped_is_seen(self):
        for first, second in ((writes(1), reads(1)), (reads(1), writes(1)), (writes(1), writes(1))):
            self.check([Op(first), Op(second)], needs=[0, 0])

    def test_a_write_that_is_not_declared_is_seen(self):
        ops = [Op(writes(1)), Op(reads(1)), Op(writes(2, 1)), Op(reads(2))]
        self.check(ops, [*ops[:2], Op(writes(2)), ops[3]])

    def test_a_workspace_that_is_not_declared_is_seen(self):
        ops = [Op(reads(9) + writes(9, 1)), Op(reads(9) + writes(9, 2), 1)]
        self.check(ops, [Op(writes(1)), Op(writes(2), 1)])

    def test_inputs_that_overlap_are_seen(self):
        ops = [Op((Access(1, 4, True),)), Op((Access(3, 6, False),), 1)]
        self.check(ops, [ops[0], Op((Access(13, 16, False),), 1)])


class TestOrder(TestCase):
    @EXAMPLES
    @given(programs)
    def test_what_units_need_is_exactly_what_conflicts_imply(self, ops):
        units = [Unit((1,), op.accesses, op.barrier) for op in ops]
        needs = conflicts(units)
        clash = [sum(1 << i for i in range(j) if in_conflict(units[i], unit)) for j, unit in enumerate(units)]
        self.assertTrue(all(need & ~all_ == 0 for need, all_ in zip(needs, clash, strict=True)))
        self.assertEqual(missing(clash, reduced(needs)), [])

    def test_an_access_has_at_least_a_byte(self):
        with self.assertRaisesRegex(ValueError, "from 0x10 ends at 0x10"):
            Access(16, 16, False)

    @EXAMPLES
    @given(programs, times)
    def test_the_edges_allow_the_predicted_time(self, ops, times):
        units = [Unit((1,), op.accesses, op.barrier, op.lane) for op in ops]
        lanes, needs, times = [unit.lane for unit in units], conflicts(units), times[: len(units)]
        order, us = schedule(reduced(needs), lanes, times)
        self.assertEqual(sorted(order), [*range(len(units))])
        pairs, ends = lane_edges(units, needs, times).pairs, {}
        for unit in order:
            ahead = [ends[a] + HOP_US * (lanes[a] != lanes[unit]) for a, later in pairs if later == unit]
            ends[unit] = times[unit] + max(ahead, default=0.0)
        self.assertEqual(max(ends.values()), us)

    def test_a_lane_starts_what_most_depends_on(self):
        """The last unit waits for unit 1, so that lane 0 starts that first; its end is 1.5 us away from lane 1."""
        self.assertEqual(schedule([(1, 2)], [0, 0, 1], [4.0, 4.0, 4.0]), ([1, 0, 2], 4.0 + HOP_US + 4.0))


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
        self.assertEqual([edge.kind for edge in edges], [EdgeKind.FULL] + [EdgeKind.PROGRAMMATIC] * 2)
        with self.assertRaisesRegex(DriverError, f"^{REMOVE} returned 1$"):
            dependencies.remove(1, [Edge(3, 4)])
        dependencies.remove(1, edges)
        self.assertEqual(dependencies.read(1), [])

    def test_an_older_driver_lacks_the_calls(self):
        with self.assertRaisesRegex(DriverError, f"^{READ} returned {NOT_FOUND}$"):
            Dependencies(object()).read(1)

    def test_captured_nodes_are_connected(self):
        api = FakeApi()
        first, second = api.make_kernel([1]), api.make_kernel([2])
        graph = api.make_graph(first, second)
        api.connect(graph, [(first, second, 0)])
        self.assertEqual(Dependencies(api).read(graph), [Edge(first, second)])
        api.fail(READ, code=CUresult.CUDA_ERROR_NOT_SUPPORTED)
        with self.assertRaisesRegex(DriverError, f"^{READ} returned CUDA_ERROR_NOT_SUPPORTED$"):
            Dependencies(api).read(graph)


if __name__ == "__main__":
    run_tests()
