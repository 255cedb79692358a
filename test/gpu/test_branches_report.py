"""What the report tells about branches, for real captures: every node is in one unit, kernels without an order only
share addresses that both only read, graphs have the same nodes as without the report, and values are eager's.

What is independent depends on the memory that the allocator gives, so depths are compared only where data decides.
"""

from __future__ import annotations

import itertools
from collections import Counter
from typing import ClassVar
from unittest import mock

import torch
import torch._functorch.config
import torch._inductor.config
from parity import both_sides, clean, requires_cuda
from torch.testing._internal.common_utils import TestCase, run_tests

import pygraph_trees
from pygraph_trees.cuda.driver import driver
from pygraph_trees.cuda.graph_nodes import NodeKind
from pygraph_trees.edges import branches
from pygraph_trees.edges.order import reduced
from pygraph_trees.report.summary import clear

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
                block = api.kernel_node(node).words()
                found = {int.from_bytes(block[at : at + 8], "little") for at in range(0, len(block), 8)}
                self.words[node] = {word for word in found if word and api.memory_type(word) == device}
        self.seen.append(self)

    def before(self):
        """By unit, the units that it follows, by any path."""
        found = [set() for _ in self.units]
        for earlier, later in reduced(self.needs):
            found[later] |= found[earlier] | {earlier}
        return found


@requires_cuda
class TestBranchesReport(TestCase):
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
        weights = [[whole(64, 64) for _ in range(3)] for _ in range(4)]

        def fn(x):
            found = []
            for layers in weights:
                y = x
                for weight in layers:
                    y = (y @ weight).clamp(-4, 4)
                found.append(y)
            return torch.stack(found)

        told, _ = self.check(fn, lambda: [whole(32, 64)])
        self.assertGreaterEqual(told.operations, 12)

    def test_a_chain_is_as_deep_as_it_is_long(self):
        weights = [whole(64, 64) for _ in range(4)]

        def fn(x):
            for weight in weights:
                x = (x @ weight).clamp(-4, 4)
            return x

        told, _ = self.check(fn, lambda: [whole(32, 64)])
        self.assertEqual(told.depth, told.operations)

    def test_a_custom_operator_is_a_barrier(self):
        def fn(x, y):
            return doubled(x @ y), y.cumsum(0)

        told, _ = self.check(fn, lambda: [whole(64, 64), whole(64, 64)])
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
        def fn(a, b, c, d):
            return a @ b, c @ d

        shapes = [(64, 1 << 14), (1 << 14, 64)] * 2
        self.check(fn, lambda: [whole(*shape, dtype=torch.float16).sign() for shape in shapes])

    def test_an_input_that_is_written_to(self):
        def fn(cache, x, y):
            cache.add_(x)
            return y.cumsum(0), (y @ y).sum()

        self.check(fn, lambda: [whole(64, 64), whole(64, 64), whole(64, 64)])

    def test_random_numbers_stay_in_order(self):
        def fn(x):
            return torch.nn.functional.dropout(x, 0.0), torch.rand_like(x) * 0

        self.check(fn, lambda: [whole(64, 64)])


if __name__ == "__main__":
    run_tests()
