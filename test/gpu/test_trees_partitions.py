"""Functions that upstream splits: operators that cannot be captured, copies between devices, CPU inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from parity import WHOLE_GRAPH, Context, ParityTestCase, calls, in_parity
from torch.testing._internal.common_utils import instantiate_parametrized_tests, parametrize, run_tests

import inductor_patches


@torch.library.custom_op("pygraph_trees_test::uncaptured", mutates_args=(), tags=[torch.Tag.cudagraph_unsafe])
def uncaptured(x: torch.Tensor) -> torch.Tensor:
    return x.flip(0) + 1


@uncaptured.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def _uncaptured_backward(ctx: object, grad: torch.Tensor) -> torch.Tensor:
    return grad.flip(0)


uncaptured.register_autograd(_uncaptured_backward)


@torch.library.custom_op("pygraph_trees_test::captured", mutates_args=())
def captured(x: torch.Tensor) -> torch.Tensor:
    return x.flip(0)


@captured.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


SPLIT: dict[str, tuple[Callable[..., Any], int]] = {  # with the number of partitions that are graphed
    "an operator in the middle": (lambda x: uncaptured(x.sin()) * 2, 2),
    "an operator at the end": (lambda x: uncaptured(x.sin() * 2), 1),
    "three parts": (lambda x: uncaptured(uncaptured(x.sin()).cos() + x).relu() * x, 3),
    "a copy to the host at the end": (lambda x: (x.sin() * 2).cpu(), 1),
}


@instantiate_parametrized_tests
class TestTreePartitions(ParityTestCase):
    by_address = True

    @parametrize("name", list(SPLIT), name_fn=lambda name: name.replace(" ", "_"))
    def test_a_function_that_is_split(self, name: str) -> None:
        function, graphed = SPLIT[name]
        tree = self.parity(calls(function)).tree
        self.assertEqual(tree.functions, graphed)

    def test_value_used_on_both_sides(self) -> None:
        def function(x: torch.Tensor) -> torch.Tensor:
            y = x @ x.t()
            return uncaptured(y).relu() + y

        tree = self.parity(calls(function)).tree
        self.assertEqual(tree.shape, ((0, ((1, ()),)),))
        self.assertGreaterEqual(len(tree.nodes[1].managed_inputs), 1)

    def test_parts_of_one_tensor(self) -> None:
        """Torch alone allocates the result of ``cat`` twice, and returns half of it without values."""
        inductor_patches.install()
        self.addCleanup(inductor_patches.uninstall)

        def function(x: torch.Tensor) -> torch.Tensor:
            y = x @ x.t()
            return torch.cat([y @ x, uncaptured(y) @ x])

        compiled = torch.compile(function, mode="reduce-overhead")
        for x in torch.rand(4, 64, 8, device="cuda"):
            self.assertEqual(compiled(x), function(x))

    def test_nothing_left_to_capture(self) -> None:
        self.assertIsNone(self.parity(calls(lambda x: uncaptured(x))).tree)

    @in_parity(modes=lambda modes: "BACKWARD" in modes and modes.count("FORWARD") >= 2)
    def test_parts_in_training(ctx: Context) -> None:
        weight = torch.randn(8, 8, device=ctx.device, requires_grad=True)
        f = ctx.compile(lambda x: uncaptured((x @ weight).tanh()).sin() @ weight)
        for _ in range(4):
            weight.grad = None
            y = f(torch.randn(4, 8, device=ctx.device))
            y.square().sum().backward()
            ctx.record(y, weight.grad)

    @in_parity(recordings=4)
    def test_parts_with_changing_shapes(ctx: Context) -> None:
        f = ctx.compile(lambda x: uncaptured(x * x.size(0)) + x.size(0), dynamic=True)
        for size in (4, 4, 4, 6, 6, 6, 4):
            ctx.record(f(torch.randn(size, 8, device=ctx.device)))

    def test_through_the_host_and_back(self) -> None:
        program = calls(lambda x: (x.sin() * 2).cpu().to(x.device).relu() + x)
        self.assertGreaterEqual(self.parity(program).tree.functions, 1)

    @in_parity(least_recordings=1)
    def test_host_input(ctx: Context) -> None:
        f = ctx.compile(lambda x, c: x * 2 + c.to(x.device))
        for _ in range(4):
            ctx.record(f(torch.randn(4, 8, device=ctx.device), torch.randn(8)))

    @in_parity(skips=0, functions=2)
    def test_mutated_buffer_in_one_part(ctx: Context) -> None:
        class Model(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.register_buffer("total", torch.zeros(8))

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                y = uncaptured(x * 2)
                self.total.add_(y.sum(0))
                return y + self.total

        model = Model().to(ctx.device)
        compiled = ctx.compile(model)
        with torch.no_grad():
            for _ in range(5):
                ctx.record(compiled(torch.randint(-3, 3, (4, 8), device=ctx.device).float()), model.total)

    @in_parity(least_recordings=1, skips=1)
    def test_mutated_input_in_one_part(ctx: Context) -> None:
        @ctx.compile
        def f(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            a = uncaptured(x.sin())
            y.add_(a)
            return a * 2

        for _ in range(4):
            y = torch.zeros(4, 8, device=ctx.device)
            ctx.record(f(torch.randn(4, 8, device=ctx.device), y), y)

    def test_operator_chosen_by_setting(self) -> None:
        program = calls(lambda x: captured(x.sin()) * 2)
        config = {"custom_should_partition_ops": ["pygraph_trees_test::captured"]}
        self.assertEqual(self.parity(program, config=config).tree.functions, 2)
        self.assertEqual(self.parity(program).tree.functions, 1)

    def test_whole_graph_with_such_an_operator_is_skipped(self) -> None:
        parity = self.parity(calls(SPLIT["an operator in the middle"][0]), config=WHOLE_GRAPH)
        self.assertIsNone(parity.tree)
        self.assertEqual(parity.counter("cudagraph_skips"), 1)
        self.assertIn("incompatible op", " ".join(line for _, line in parity.logs))

    def test_shape_that_depends_on_data(self) -> None:
        def function(x: torch.Tensor) -> torch.Tensor:
            y = x.sin() * 2
            return torch.nonzero(y > 0).sum() + y.relu().sum()

        program, dynamo_config = calls(function, fullgraph=True), {"capture_dynamic_output_shape_ops": True}
        self.assertGreaterEqual(self.parity(program, dynamo_config=dynamo_config).tree.functions, 1)


if __name__ == "__main__":
    run_tests()
