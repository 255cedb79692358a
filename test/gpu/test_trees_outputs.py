"""Outputs of a recording: aliases of each other, of earlier outputs and of parameters; nothing, numbers, empty.

Tests that assert the kinds of outputs turn partitioning off: a partition returns each buffer once, and leaves views,
numbers and missing gradients to the code around it. With inputs by address, a program's user must see the same.
"""

from __future__ import annotations

from typing import Any

import torch
from parity import WHOLE_GRAPH, Context, ParityTestCase, in_parity, marked
from torch.testing._internal.common_utils import run_tests


def kinds(nodes: list[Any]) -> list[str]:
    return [output.kind for node in nodes for output in node.outputs]


class TestTreeOutputs(ParityTestCase):
    by_address = True

    def test_outputs_alias_each_other(self) -> None:
        def program(ctx: Context) -> None:
            @ctx.compile
            def f(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
                y = x @ x.t()
                return y, y[1:], y.t()

            for _ in range(4):
                a, b, c = f(torch.randn(4, 8, device=ctx.device))
                ctx.record(a, b, c, a.untyped_storage().data_ptr() == c.untyped_storage().data_ptr())
                a.add_(1)
                ctx.record(b, c)

        tree = self.parity(program, config=WHOLE_GRAPH).tree
        self.assertEqual(kinds(tree.nodes[:1]), ["new", "with output 0", "with output 0"])
        self.assertEqual([output.unaliased for output in tree.nodes[0].outputs], [False, False, False])

    @in_parity(recordings=1)
    def test_one_tensor_returned_twice(ctx: Context) -> None:
        @ctx.compile
        def f(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            y = x.exp()
            return y, y

        for _ in range(4):
            a, b = f(torch.randn(4, 8, device=ctx.device))
            ctx.record(a, b)
            ctx.fact("same object", a is b)

    def test_output_aliases_an_output_of_an_earlier_recording(self) -> None:
        def program(ctx: Context) -> None:
            f = ctx.compile(lambda x: x * 2)
            # The forward of g passes its input to its backward.
            g = ctx.compile(lambda y, w: (y * w).sin())
            for _ in marked(range(4)):
                w = torch.randn(4, 8, device=ctx.device, requires_grad=True)
                with torch.no_grad():
                    y = f(torch.randn(4, 8, device=ctx.device))
                z = g(y, w)
                z.sum().backward()
                ctx.record(y, z, w.grad)

        tree = self.parity(program, config=WHOLE_GRAPH).tree
        self.assertIn("prior (0, 0)", kinds(tree.nodes))
        self.assertTrue(any(any(node.preserved_inputs) for node in tree.nodes))

    @in_parity(config=WHOLE_GRAPH, nodes=lambda nodes: "none" in kinds(nodes))
    def test_gradients_that_do_not_exist(ctx: Context) -> None:
        f = ctx.compile(lambda x, w, scale: (x * w * scale).cos())
        w = torch.randn(8, device=ctx.device, requires_grad=True)
        for _ in range(4):
            w.grad = None
            x = torch.randn(4, 8, device=ctx.device)
            scale = torch.randn(8, device=ctx.device)
            f(x, w, scale).sum().backward()
            ctx.record(w.grad, x.grad, scale.grad)

    @in_parity(config=WHOLE_GRAPH, nodes=lambda nodes: {"int 4", "int 6"} <= {*kinds(nodes)})
    def test_numbers_among_the_outputs(ctx: Context) -> None:
        # The forward passes the symbolic size to the backward.
        f = ctx.compile(lambda x, w: (x * w).sum(0) * x.size(0), dynamic=True)
        for size in (4, 4, 4, 6, 6, 6, 4):
            w = torch.ones(size, 8, device=ctx.device, requires_grad=True)
            f(torch.randn(size, 8, device=ctx.device), w).sum().backward()
            ctx.record(w.grad)

    @in_parity(modes=("INFERENCE", "FORWARD", "BACKWARD"))
    def test_parameter_and_its_view(ctx: Context) -> None:
        class Model(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.weight = torch.nn.Parameter(torch.randn(8, 4))

            def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
                return self.weight, self.weight.t(), x @ self.weight

        model = Model().to(ctx.device)
        compiled = ctx.compile(model)
        for requires_grad in (False, True):
            for _ in range(3):
                with torch.set_grad_enabled(requires_grad):
                    weight, view, y = compiled(torch.randn(4, 8, device=ctx.device))
                ctx.record(weight, view, y, weight is model.weight)
                if requires_grad:
                    (y.sum() + view.sum()).backward()
                    ctx.record(model.weight.grad)
                    model.weight.grad = None

    @in_parity(config=WHOLE_GRAPH, roots=lambda roots: "static" in kinds(roots[:1]))
    def test_parameter_saved_for_backward_is_static(ctx: Context) -> None:
        model = torch.nn.Linear(8, 4, device=ctx.device)
        compiled = ctx.compile(model)
        for _ in range(4):
            x = torch.randn(4, 8, device=ctx.device, requires_grad=True)
            compiled(x).sum().backward()
            ctx.record(x.grad, model.weight.grad, model.bias.grad)
            model.zero_grad()

    @in_parity(config=WHOLE_GRAPH, nodes=lambda nodes: kinds(nodes[:1]) == ["static", "new", "new"])
    def test_nothing_in_them(ctx: Context) -> None:
        f = ctx.compile(lambda x, full: (x * 2, full + 1, torch.cat([x, full]).neg()))
        for _ in range(4):
            ctx.record(*f(torch.randn(0, 8, device=ctx.device), torch.randn(4, 8, device=ctx.device)))

    def test_offset_into_a_larger_storage(self) -> None:
        def program(ctx: Context) -> None:
            f = ctx.compile(lambda x: (x @ x.t())[2:, 1:])
            for _ in range(4):
                y = f(torch.randn(4, 8, device=ctx.device))
                ctx.record(y)
                ctx.fact("whole storage", y.untyped_storage().nbytes())

        output = self.parity(program, config=WHOLE_GRAPH).tree.nodes[0].outputs[0]
        self.assertEqual((output.storage_offset, output.nbytes), (9, 64))

    def test_tensor_object_is_reused(self) -> None:
        def program(ctx: Context) -> None:
            f = ctx.compile(lambda x: x * 2)
            previous = None
            for step in range(6):
                y = f(torch.randn(4, 8, device=ctx.device))
                ctx.fact(f"same object {step}", y is previous)
                previous = y

        parity = self.parity(program)
        # Replays return the tensor of the previous replay; the warmup and the recording have their own.
        self.assertEqual([parity.noted(f"same object {step}") for step in range(6)], [False] * 3 + [True] * 3)

    @in_parity(modes=("FORWARD", "BACKWARD"))
    def test_hooks_on_an_output_do_not_stay(ctx: Context) -> None:
        f = ctx.compile(lambda x: x * x)
        for step in range(6):
            x = torch.randn(4, 8, device=ctx.device, requires_grad=True)
            y = f(x)
            if step in (3, 4):
                y.register_hook(lambda grad: grad * 10)
            y.sum().backward()
            ctx.record(x.grad)


if __name__ == "__main__":
    run_tests()
