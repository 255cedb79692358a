"""Inputs of a recording: parameters that move, marked addresses, alignment, strides, numbers, changing shapes.

Each program runs under upstream's trees and under ours with every feature off (``parity.py``), and must show the same
facts. With inputs by address, its user must see the same. Eager is the oracle for values.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from parity import WHOLE_GRAPH, ParityTestCase
from torch.testing._internal.common_utils import instantiate_parametrized_tests, parametrize, run_tests

if TYPE_CHECKING:
    from parity import Context


def scale(x: torch.Tensor) -> torch.Tensor:
    return x * 2 + 1


class TestTreeInputs(ParityTestCase):
    by_address = True

    def test_parameter_storage_is_swapped(self) -> None:
        def program(ctx: Context) -> None:
            model = torch.nn.Linear(8, 4, device=ctx.device)
            compiled = ctx.compile(model)
            first, second = model.weight.data, torch.randn(4, 8, device=ctx.device)
            with torch.no_grad():
                for data in (first, first, first, second, second, first, second):
                    model.weight.data = data
                    ctx.record(compiled(torch.randn(4, 8, device=ctx.device)))

        tree = self.parity(program).tree
        self.assertEqual(tree.shape, ((0, ()), (0, ())))
        self.assertEqual(tree.fail_count, 2)

    def test_parameter_storage_is_swapped_in_training(self) -> None:
        def program(ctx: Context) -> None:
            model = torch.nn.Linear(8, 4, device=ctx.device)
            compiled = ctx.compile(model)
            kept = [model.weight.data]
            for step in range(8):
                if step in (3, 6):
                    kept.append(torch.randn(4, 8, device=ctx.device))
                    model.weight.data = kept[-1]
                x = torch.randn(4, 8, device=ctx.device, requires_grad=True)
                compiled(x).sum().backward()
                ctx.record(x.grad, model.weight.grad)
                model.zero_grad()

        # Up to 2.14, unreferenced outputs of upstream's earlier trees keep their autograd graphs, and so x.
        parity = self.parity(program, besides=["allocated bytes"])
        more = (parity.upstream.allocated_bytes or 0) - (parity.ours.allocated_bytes or 0)
        self.assertIn(more, (0, 2 * 512))  # the allocator's smallest blocks
        self.assertEqual(len(parity.tree.roots), 3)
        self.assertEqual(parity.tree.recordings, 6)

    def test_parameter_changes_in_place(self) -> None:
        def program(ctx: Context) -> None:
            model = torch.nn.Linear(8, 4, device=ctx.device)
            compiled = ctx.compile(model)
            with torch.no_grad():
                for _ in range(5):
                    ctx.record(compiled(torch.randn(4, 8, device=ctx.device)))
                    model.weight.add_(1)
                    model.bias.copy_(torch.randn(4, device=ctx.device))

        self.assertEqual(self.parity(program).tree.recordings, 1)

    def test_marked_static_address(self) -> None:
        def program(ctx: Context) -> None:
            f = ctx.compile(lambda table, x: table * x + 1)
            table = torch.randn(4, 8, device=ctx.device)
            torch._dynamo.mark_static_address(table)
            for _ in range(5):
                ctx.record(f(table, torch.randn(4, 8, device=ctx.device)))
                table.add_(1)

        parity = self.parity(program)
        self.assertEqual(parity.tree.recordings, 1)
        self.assertEqual(len(parity.tree.nodes[0].persistent_inputs), 1)
        self.assertEqual(parity.counter("cudagraph_recorded_non_static_inputs"), 1)

    def test_marked_without_a_guard(self) -> None:
        def program(ctx: Context) -> None:
            f = ctx.compile(lambda table, x: table * x + 1)
            tables = [torch.randn(4, 8, device=ctx.device) for _ in range(3)]
            for table in tables:
                torch._dynamo.mark_static_address(table, guard=False)
            for index in (0, 0, 0, 1, 1, 2, 0, 1, 2):
                ctx.record(f(tables[index], torch.randn(4, 8, device=ctx.device)))

        tree = self.parity(program).tree
        self.assertEqual((tree.functions, tree.recordings, tree.fail_count), (1, 3, 3))

    @parametrize("offsets", [(0, 0, 0, 1, 2, 16, 3, 0), (1, 1, 1, 2, 0, 5)], name_fn=lambda offsets: str(offsets[0]))
    def test_misaligned_after_aligned_or_from_the_start(self, offsets: tuple[int, ...]) -> None:
        def program(ctx: Context) -> None:
            f = ctx.compile(scale)
            base = torch.randn(80, device=ctx.device)
            for offset in offsets:
                ctx.record(f(base[offset : offset + 64]))

        self.assertGreaterEqual(self.parity(program).tree.recordings, 1)

    def test_misaligned_parameter(self) -> None:
        def program(ctx: Context) -> None:
            class Model(torch.nn.Module):
                def __init__(self) -> None:
                    super().__init__()
                    self.weight = torch.nn.Parameter(torch.randn(33, device=ctx.device)[1:])

                def forward(self, x: torch.Tensor) -> torch.Tensor:
                    return x * self.weight

            compiled = ctx.compile(Model())
            with torch.no_grad():
                ctx.call(compiled, (4, 32))

        tree = self.parity(program).tree
        self.assertEqual((tree.recordings, len(tree.nodes[0].copied_inputs)), (1, 2))

    def test_expanded(self) -> None:
        def program(ctx: Context) -> None:
            f = ctx.compile(scale)
            for _ in range(4):
                ctx.record(f(torch.randn(4, 1, device=ctx.device).expand(4, 8)))

        tree = self.parity(program).tree
        self.assertEqual(tree.nodes[0].expanded_dims, ((1,),))

    def test_overlapping_strides(self) -> None:
        def program(ctx: Context) -> None:
            f = ctx.compile(scale)
            for _ in range(4):
                ctx.record(f(torch.randn(16, device=ctx.device).as_strided((4, 4), (2, 1))))
            ctx.fact("skips", ctx.counter("cudagraph_skips"))

        # Upstream gives partitions up without counting it.
        self.assertEqual(self.parity(program).counter("cudagraph_skips"), 0)
        parity = self.parity(program, config=WHOLE_GRAPH)
        # Newer versions copy such inputs element by element.
        self.assertEqual(parity.noted("skips") > 0, parity.ours.tree is None)

    def test_strides(self) -> None:
        def program(ctx: Context) -> None:
            f = ctx.compile(lambda a, b, c: (a.sin() + 1, b * 2, c.relu()))
            for _ in range(4):
                a = torch.randn(8, 4, device=ctx.device).t()
                b = torch.randn(2, 3, 4, 5, device=ctx.device).to(memory_format=torch.channels_last)
                c = torch.randn(4, 32, device=ctx.device)[:, ::2]
                ctx.record(*f(a, b, c))

        self.assertEqual(self.parity(program).tree.recordings, 1)

    def test_inputs_share_their_memory(self) -> None:
        def program(ctx: Context) -> None:
            f = ctx.compile(lambda a, b: a * 2 + b)
            for _ in range(4):
                x = torch.randn(8, 8, device=ctx.device)
                ctx.record(f(x[:4], x[4:]))
                ctx.record(f(x[1:5], x[2:6]))
            for _ in range(4):
                x = torch.randn(4, 8, device=ctx.device)
                ctx.record(f(x, x))

        self.assertGreaterEqual(self.parity(program).tree.recordings, 2)

    def test_whole_numbers(self) -> None:
        def program(ctx: Context) -> None:
            f = ctx.compile(lambda x, n: x * n + n)
            for n in (2, 2, 2, 3, 3, 3, 4, 4, 4, 3, 4):
                ctx.record(f(torch.randn(4, 8, device=ctx.device), n))

        tree = self.parity(program).tree
        # The first number is a constant of the first compilation; each later one has its own recording.
        self.assertEqual((tree.functions, tree.recordings), (3, 3))

    def test_shapes_change(self) -> None:
        def program(ctx: Context) -> None:
            f = ctx.compile(lambda x: x.sum(0) * x.size(0), dynamic=True)
            for size in (4, 4, 4, 8, 8, 8, 4, 8, 16, 16, 4):
                ctx.record(f(torch.randint(-4, 4, (size, 8), device=ctx.device).float()))

        parity = self.parity(program)
        self.assertEqual((parity.tree.functions, parity.tree.recordings), (3, 3))
        self.assertEqual(parity.counter("cudagraph_skips"), 0)

    def test_shapes_become_dynamic(self) -> None:
        def program(ctx: Context) -> None:
            model = torch.nn.Linear(8, 4, device=ctx.device)
            compiled = ctx.compile(model)
            for size in (4, 4, 4, 6, 6, 6, 5, 5, 5, 4, 6):
                x = torch.randn(size, 8, device=ctx.device, requires_grad=True)
                compiled(x).sum().backward()
                ctx.record(x.grad, model.weight.grad)
                model.zero_grad()

        tree = self.parity(program).tree
        self.assertEqual(tree.recordings, 6)

    def test_too_many_shapes_are_warned_of(self) -> None:
        def program(ctx: Context) -> None:
            f = ctx.compile(scale, dynamic=True)
            for size in range(2, 13):
                ctx.record(f(torch.randn(size, 8, device=ctx.device)))

        parity = self.parity(program)
        self.assertEqual(parity.tree.functions, 11)
        warned = [line for _, line in parity.ours.logs if "We have observed 9 distinct sizes" in line]
        self.assertEqual(len(warned), 1)

    def test_memory_of_an_input_is_used_again_by_others(self) -> None:
        def program(ctx: Context) -> None:
            f = ctx.compile(scale)
            for _ in range(6):
                x = torch.randn(64, device=ctx.device)
                y = f(x)
                del x
                others = [torch.full((64,), 7.0, device=ctx.device) for _ in range(4)]
                ctx.record(y, *others)

        self.assertEqual(self.parity(program).tree.recordings, 1)

    def test_output_of_the_last_call_as_input_without_a_copy(self) -> None:
        def program(ctx: Context) -> None:
            f = ctx.compile(lambda h: h.cos() * 0.5)
            h = torch.randn(4, 8, device=ctx.device)
            for _ in range(6):
                try:
                    h = f(h)
                    ctx.fact("output", h)
                except Exception as error:
                    ctx.fact("error", error)
                    h = torch.ones(4, 8, device=ctx.device)

        self.assertOverwritten(self.parity(program, oracle=False).errors[0])

    def test_recurrence_within_a_step(self) -> None:
        def program(ctx: Context) -> None:
            f = ctx.compile(lambda h: h.cos() * 0.5)
            for _ in range(4):
                torch.compiler.cudagraph_mark_step_begin()
                h = torch.randn(4, 8, device=ctx.device)
                for _ in range(3):
                    h = f(h)
                ctx.record(h)

        tree = self.parity(program).tree
        self.assertEqual(tree.functions, 1)
        self.assertEqual(len(tree.roots), 1)
        self.assertEqual(len(tree.nodes[1].managed_inputs), 1)


instantiate_parametrized_tests(TestTreeInputs)

if __name__ == "__main__":
    run_tests()
