"""Branches of real captures. For the report: every node is in one unit, kernels without an order only share addresses
that both only read, graphs have the same nodes as without the report, and values are eager's. What is independent
depends on the memory that the allocator gives, so depths are compared only where data decides.

On lanes: values and gradients have the bits of graphs without branches, with the chain's edges and with other ones, and
with random delays before random operations, so that a missing edge shows. Twin critics are an exception: Inductor may
select different block sizes for their reductions, which changes the rounding.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter
from dataclasses import replace
from typing import ClassVar
from unittest import mock

import torch
import torch._functorch.config
import torch._inductor.config
from fuzzing.everything import delayed, poisoned
from parity import both_sides, clean, requires_cuda
from torch._inductor.utils import fresh_cache
from torch.testing._internal.common_utils import TestCase, run_tests

import pygraph_trees
from pygraph_trees.cuda.driver import driver
from pygraph_trees.cuda.graph_nodes import KernelNode, NodeKind
from pygraph_trees.edges import branches, rewriting, trial
from pygraph_trees.edges.data_flow import Forecast
from pygraph_trees.edges.order import reduced
from pygraph_trees.reasons import Reason
from pygraph_trees.report.summary import clear
from pygraph_trees.selection.profiles import Kept
from pygraph_trees.trees.recordings import captured_graph

FLAG = "triton.pygraph_branches"
DEVICE = "cuda"


@torch.library.custom_op("branches_report_test::doubled", mutates_args=())
def doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@doubled.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def whole(*shape, dtype=torch.float32):
    """Small whole numbers, whose sums and products are exact in any order."""
    return torch.randint(-2, 3, shape, device=DEVICE).to(dtype)


class Looked(branches.Chain):
    """A chain that remembers what it was made of, and the device addresses that each kernel holds."""

    seen: ClassVar[list[Looked]] = []

    def __init__(self, calls, graph, nodes, units):
        super().__init__(calls, graph, nodes, units)
        api = driver()
        device = int(api.api.CUmemorytype.CU_MEMORYTYPE_DEVICE)
        self.nodes, self.in_graph = nodes, api.nodes(graph)
        self.words = {}
        for node in nodes:
            if api.node_kind(node) is NodeKind.KERNEL:
                block = KernelNode(api, node).words()
                found = {int.from_bytes(block[at : at + 8], "little") for at in range(0, len(block), 8)}
                self.words[node] = {word for word in found if word and api.memory_type(word) == device}
        self.seen.append(self)

    def replace(self, pairs):
        """After this, the edges between units must be these, and no others."""
        super().replace(pairs)
        between = [edge for edge in self._calls.read(self.graph) if self._is_between(edge)]
        assert {*self._pairs(between)} == {*pairs}, "there are other edges"
        assert len(between) == sum(len(self._tails[a]) * len(self._heads[b]) for a, b in pairs)
        self.replaced = tuple(pairs)

    replaced: tuple[tuple[int, int], ...] | None = None

    def before(self):
        """By unit, the units that it follows, by any path."""
        found = [set() for _ in self.units]
        for earlier, later in reduced(self.needs):
            found[later] |= found[earlier] | {earlier}
        return found


class BranchesTestCase(TestCase):
    def setUp(self) -> None:
        super().setUp()
        if driver() is None:
            self.skipTest("needs cuda.bindings")
        torch.manual_seed(0)
        Looked.seen.clear()
        self.enterContext(mock.patch.object(branches, "Chain", Looked))
        self.enterContext(torch._inductor.config.patch(both_sides()))
        self.enterContext(torch._functorch.config.patch(enable_autograd_cache=False))
        self.addCleanup(clean)


@requires_cuda
class TestBranchesReport(BranchesTestCase):
    def recordings(self, fn, make, flag):
        """The recordings of a function, whose values in each call are eager's."""
        clean()
        clear()
        with torch._inductor.config.patch({FLAG: flag}):
            compiled = torch.compile(fn, mode="reduce-overhead")
            for _ in range(4):
                given = make()
                copies = [t.clone() for t in given]
                torch.compiler.cudagraph_mark_step_begin()
                with torch.no_grad():
                    self.assertEqual(compiled(*given), fn(*copies), rtol=0, atol=0)
                self.assertEqual(given, copies)  # what it mutates
        found = [r for f in pygraph_trees.report().functions for r in f.recordings]
        self.assertGreater(len(found), 0)
        self.assertGreater(sum(r.replays for r in found), 0)
        return found

    def check(self, fn, make):
        """The only recording's branches, and its chain, after all that must hold."""
        plain = self.recordings(fn, make, "off")
        self.assertEqual([(r.branches, r.why_no_branches) for r in plain], [(None, None)] * len(plain))
        self.assertEqual(Looked.seen, [])
        (found,), (without,) = self.recordings(fn, make, "report"), plain
        self.assertEqual((found.kernels, found.other_nodes), (without.kernels, without.other_nodes))
        self.assertIsNone(found.why_no_branches)
        (chain,) = Looked.seen
        self.check_order(chain)
        told = found.branches
        self.assertEqual(told.operations, len(chain.units))
        self.assertEqual(told.barriers, sum(unit.barrier for unit in chain.units))
        self.assertIn(told.depth, range(1, told.operations + 1))
        self.assertTrue(all(us <= told.chain_us for us in told.lanes_us.values()), told)
        self.assertIn(f"branches: {told.operations} operation", str(pygraph_trees.report()))
        return told, chain

    def check_order(self, chain):
        self.assertEqual(Counter(chain.nodes), Counter(chain.in_graph))
        self.assertEqual(Counter(chain.nodes), Counter(node for unit in chain.units for node in unit.nodes))
        before = chain.before()
        for one, other in itertools.combinations(range(len(chain.units)), 2):
            if one in before[other]:
                continue
            first, second = chain.units[one], chain.units[other]
            self.assertFalse(first.barrier or second.barrier)
            for a, b in itertools.product(first.accesses, second.accesses):
                self.assertFalse((a.write or b.write) and a.start < b.end and b.start < a.end, (a, b))
            held = [set().union(*(chain.words.get(node, set()) for node in u.nodes)) for u in (first, second)]
            for word in held[0] & held[1]:
                for unit in (first, second):
                    at = [a for a in unit.accesses if a.start <= word < a.end]
                    self.assertTrue(at and not any(a.write for a in at), f"{word:#x} is in {at}")

    def test_mlps_side_by_side(self):
        nets = [perceptron((64,) * 4) for _ in range(4)]
        told, _ = self.check(lambda x: torch.stack([net(x) for net in nets]), lambda: [whole(32, 64)])
        self.assertGreaterEqual(told.operations, 12)

    def test_a_chain_is_as_deep_as_it_is_long(self):
        told, _ = self.check(perceptron((64,) * 5), lambda: [whole(32, 64)])
        self.assertEqual(told.depth, told.operations)

    def test_a_custom_operator_is_a_barrier(self):
        told, _ = self.check(lambda x, y: (doubled(x @ y), y.cumsum(0)), lambda: [whole(64, 64), whole(64, 64)])
        self.assertGreaterEqual(told.barriers, 1)

    def test_atomic_additions_to_one_buffer(self):
        def fn(index, values, others):
            out = values.new_zeros(128)
            out.index_put_((index,), values, accumulate=True)
            out.index_put_((index,), others, accumulate=True)
            return out

        index = torch.randint(0, 128, (4096,), device=DEVICE)
        self.check(fn, lambda: [index.clone(), whole(4096), whole(4096)])

    def test_matmuls_that_split_k_share_a_workspace(self):
        shapes = [(64, 1 << 14), (1 << 14, 64)] * 2
        half = torch.float16
        self.check(lambda a, b, c, d: (a @ b, c @ d), lambda: [whole(*shape, dtype=half).sign() for shape in shapes])

    def test_an_input_that_is_written_to(self):
        def fn(cache, x, y):
            cache.add_(x)
            return y.cumsum(0), (y @ y).sum()

        self.check(fn, lambda: [whole(64, 64), whole(64, 64), whole(64, 64)])

    def test_random_numbers_stay_in_order(self):
        self.check(lambda x: (torch.nn.functional.dropout(x, 0.0), torch.rand_like(x) * 0), lambda: [whole(64, 64)])


def perceptron(sizes):
    layers = [whole(a, b) for a, b in itertools.pairwise(sizes)]

    def run(x):
        for weight in layers:
            x = (x @ weight).clamp(-4, 4)
        return x

    return run


def mlps(compiled):
    nets = [perceptron((64, 64, 64, 64)) for _ in range(6)]
    fn = compiled(lambda x: torch.stack([net(x) for net in nets]))
    return lambda: [fn(whole(32, 64))]


def chain(compiled):
    net = perceptron((64,) * 8)
    fn = compiled(net)
    return lambda: [fn(whole(32, 64))]


def bags(compiled):
    """Sums of embeddings, and a network for dense features, as in DLRM."""
    tables = [whole(1000, 32) for _ in range(8)]
    net = perceptron((16, 64, 32))

    def fn(dense, index):
        found = [
            torch.nn.functional.embedding_bag(i, table, mode="sum") for i, table in zip(index, tables, strict=True)
        ]
        x = torch.stack([net(dense), *found], 1)
        return (x @ x.mT).flatten(1), x.sum(1)

    fn = compiled(fn)
    return lambda: [*fn(whole(128, 16), torch.randint(0, 1000, (8, 128, 5), device=DEVICE))]


def critics(compiled):
    """An update of twin critics: gradients, and a step of an optimizer between two graphs."""
    Linear, ReLU = torch.nn.Linear, torch.nn.ReLU
    nets = [torch.nn.Sequential(Linear(64, 64), ReLU(), Linear(64, 64), ReLU(), Linear(64, 1)) for _ in range(2)]
    nets = torch.nn.ModuleList(nets).to(DEVICE)
    optimizer = torch.optim.SGD(nets.parameters(), lr=1e-3)

    def loss(x, target):
        return sum((net(x) - target).square().mean() for net in nets)

    fn = compiled(loss)

    def step():
        found = fn(torch.randn(32, 64, device=DEVICE), torch.randn(32, 1, device=DEVICE))
        found.backward()
        gradients = [p.grad.clone() for p in nets.parameters()]
        optimizer.step()
        optimizer.zero_grad()
        return [found.detach(), *gradients, *(p.detach() for p in nets.parameters())]

    return step


def dropouts(compiled):
    net = perceptron((64, 64, 64))

    def fn(x, y):
        one = torch.nn.functional.dropout(net(x), 0.5)
        other = net(y) + torch.rand_like(y)
        return one, other, torch.randn(16, device=DEVICE)

    fn = compiled(fn)
    return lambda: [*fn(whole(32, 64), whole(32, 64))]


def in_place(compiled):
    caches = [whole(64, 64) for _ in range(3)]

    def fn(x, a, b, c):
        for cache in (a, b, c):
            cache.mul_(0.5).add_(x @ x)
        return a.sum(), (x @ x).cumsum(0), torch.stack([a, b, c]).cumsum(0)

    fn = compiled(fn)
    return lambda: [*fn(whole(64, 64), *caches), *caches]


def split_matmuls(compiled):
    """Matmuls that split k keep sums in a workspace, which each lane must have for itself."""
    fn = compiled(lambda a, b, c, d: (a @ b, c @ d))
    shapes = [(64, 1 << 14), (1 << 14, 64)] * 2
    return lambda: [*fn(*(whole(*shape, dtype=torch.float16).sign() for shape in shapes))]


def two_graphs(compiled):
    """The second function's recording follows the first one's, in the same pool, while outputs of it are alive."""
    nets = [perceptron((64, 64, 64)) for _ in range(4)]
    first = compiled(lambda x: [net(x) for net in nets])
    second = compiled(lambda xs: torch.stack([net(x) for net, x in zip(nets, xs, strict=True)]))

    def step():
        found = first(whole(32, 64))
        return [second(found), *found]

    return step


PROGRAMS = (mlps, chain, bags, critics, dropouts, in_place, split_matmuls, two_graphs)
BY_DATA = (mlps, bags, critics)  # with operations that data leaves side by side


@requires_cuda
class TestSideBySide(BranchesTestCase):
    def values(self, program, flag, calls=8, keep=False):
        """What each call gives; ``keep``: the outputs themselves, read when all calls are over."""
        self.step = None
        clean()
        clear()
        Looked.seen.clear()
        torch.manual_seed(0)
        found = []
        # A compilation leaves torch's ``deterministic`` off; another one would generate other code.
        with torch._inductor.config.patch({**both_sides(), FLAG: flag}):
            self.step = step = program(lambda fn: torch.compile(fn, mode="reduce-overhead"))
            for call in range(calls):
                if call == calls - 8:
                    torch.cuda.synchronize()  # a trial ends once the GPU has caught up
                if not keep:
                    torch.compiler.cudagraph_mark_step_begin()
                with torch.set_grad_enabled(program is critics):
                    given = step()
                found.append(given if keep else [t.clone() for t in given])
            torch.cuda.synchronize()
            found = [[t.clone() for t in given] for given in found]
        self.recordings = [r for f in pygraph_trees.report().functions for r in f.recordings]
        self.assertGreater(sum(r.replays for r in self.recordings), 0)
        return found

    def check(self, program, expected, **more):
        found = self.values(program, "always", **more)
        # Both ways compile the reductions, and Inductor's timings may select different block sizes.
        tolerance = {"rtol": 1e-4, "atol": 1e-6} if program is critics else {"rtol": 0, "atol": 0}
        self.assertEqual(found, expected, **tolerance)
        self.assertEqual([r.why_no_branches for r in self.recordings], [None] * len(self.recordings))
        lanes = [r.branches.lanes for r in self.recordings]
        if program in BY_DATA:
            self.assertGreater(max(lanes), 1)
        if program is chain:
            self.assertEqual(lanes, [1] * len(lanes))
        replaced = [looked for looked in Looked.seen if looked.replaced is not None]
        self.assertEqual(len(replaced), sum(count > 1 for count in lanes))
        return replaced

    def test_values_on_lanes_in_the_captured_order(self):
        for program in PROGRAMS:
            with self.subTest(program.__name__):
                expected = self.values(program, "off")
                self.assertEqual(Looked.seen, [])
                with mock.patch.object(branches, "SIDE_BY_SIDE", False):
                    for looked in self.check(program, expected):
                        self.assertEqual({*looked.replaced}, {*itertools.pairwise(range(len(looked.units)))})

    def test_values_side_by_side(self):
        for program in PROGRAMS:
            with self.subTest(program.__name__):
                replaced = self.check(program, self.values(program, "off"))
                if program in BY_DATA:
                    chains = [{*itertools.pairwise(range(len(looked.units)))} for looked in replaced]
                    self.assertTrue(
                        any({*looked.replaced} != found for looked, found in zip(replaced, chains, strict=True))
                    )

    def test_values_with_delays(self):
        """Spin kernels of up to 50 us are part of a random half of the operations, and old results are overwritten."""
        for program in (mlps, bags, critics, in_place, split_matmuls):
            expected = self.values(program, "off")
            for seed in range(3):
                with self.subTest(program.__name__, seed=seed), delayed(seed), poisoned():
                    self.check(program, expected)

    def test_a_missing_edge_shows_if_old_results_are_overwritten(self):
        """An operation that waits for nothing reads what the replay before has left."""

        def spans(unit, *, write):
            return {(access.start, access.end) for access in unit.accesses if access.write is write}

        def one_too_few(units, needs, times_us):
            made = [spans(unit, write=True) for unit in units]
            late = max(i for i, u in enumerate(units) if any(spans(u, write=False) & before for before in made[:i]))
            pairs = branches_edges(units, needs, times_us)
            before, after = ([p[i] for p in pairs if p[1 - i] == late] for i in (0, 1))
            kept = {pair for pair in pairs if pair[1] != late}
            return sorted(kept | {*itertools.product(before, after)}, key=lambda pair: pair[::-1])

        branches_edges, shown = branches.lane_edges, []
        for patch in (poisoned(), contextlib.nullcontext()):
            with (
                mock.patch.object(branches, "lane_edges", one_too_few),
                mock.patch.object(rewriting, "missing", lambda *_: []),
                patch,
            ):
                found = self.values(mlps, "always")
            shown.append(any(t.isnan().any().item() for given in found for t in given))
        self.assertEqual(shown, [True, False])

    def test_outputs_that_are_kept(self):
        for program in (mlps, bags, two_graphs):
            with self.subTest(program.__name__):
                self.check(program, self.values(program, "off", keep=True), keep=True)

    def test_values_during_and_after_a_trial(self):
        """All calls of both forms; what a real trial finds is replaced by each result."""
        real = trial.compared
        for program, pays in (*((program, True) for program in PROGRAMS), (mlps, False)):
            with (
                self.subTest(program.__name__, pays=pays),
                mock.patch.object(Forecast, "choose", lambda forecast: (4, Reason.ON_LANES(lanes=4))),
                mock.patch.object(trial, "compared", lambda *ways, pays=pays: replace(real(*ways), pays=pays)),
                mock.patch.multiple(Kept, find=lambda *_: None, store=mock.DEFAULT) as kept,
            ):
                expected, found = (self.values(program, flag, calls=trial.ALL + 40) for flag in ("off", "auto"))
                # The halves in the caches of the second become too small to be exact.
                is_inexact = program in (critics, in_place)
                self.assertEqual(found, expected, rtol=1e-3 * is_inexact, atol=1e-4 * is_inexact)
                # Memory that lanes take for nothing may be given back, by recordings in the captured order.
                made = [
                    [r for r in f.recordings if r.branches and r.branches.lanes > 1]
                    for f in pygraph_trees.report().functions
                ]
                on_lanes = [each[-1] for each in made if each]
                self.assertGreaterEqual(len(on_lanes), program in BY_DATA)
                for recording in on_lanes:
                    self.assertIsNotNone(recording.branches.measured_us)  # 0 if a launch takes longer
                    self.assertEqual(recording.why_no_branches is None, pays)
                stored = [call.args[-1] > 0 for call in kept["store"].call_args_list if len(call.args) == 3]
                self.assertEqual({*stored}, {pays} if on_lanes else set())

    def test_a_later_process_measures_nothing(self):
        """The profile of a first trial is found by a function that is compiled again, as in another process."""
        with fresh_cache(), mock.patch.object(Forecast, "choose", lambda forecast: (4, Reason.ON_LANES(lanes=4))):
            first = self.values(mlps, "auto", calls=trial.ALL + 40)
            lanes = self.recordings[-1].branches.lanes * (self.recordings[-1].why_no_branches is None)
            with mock.patch.object(captured_graph, "Trial", side_effect=AssertionError("a trial")):
                self.assertEqual(self.values(mlps, "auto", calls=len(first)), first)
            self.assertEqual([(r.branches and r.branches.lanes) or 0 for r in self.recordings[-1:]], [lanes])

    def test_the_captured_order_is_a_chain_without_changes(self):
        """No edge has to be removed: streams that wait for a lane follow its last operation only."""
        self.values(mlps, "always")
        (looked,) = [looked for looked in Looked.seen if looked.replaced is not None]
        between = [edge for edge in looked._captured if looked._is_between(edge)]
        tails, heads = looked._tails, looked._heads
        self.assertEqual(len(between), sum(len(a) * len(b) for a, b in zip(tails, heads[1:], strict=False)))

    def test_each_lane_has_memory_of_its_own(self):
        self.values(mlps, "always")
        pools = {}
        for segment in torch.cuda.memory_snapshot():
            pools.setdefault(segment["segment_pool_id"], set()).add(segment["stream"])
        self.assertGreater(max(len(streams) for pool, streams in pools.items() if tuple(pool) != (0, 0)), 1)

    def test_a_spin_kernel_is_no_barrier(self):
        """Otherwise, delays would show nothing."""
        with delayed(0):
            self.values(mlps, "always")
        self.assertEqual([r.branches.barriers for r in self.recordings], [0])


if __name__ == "__main__":
    run_tests()
