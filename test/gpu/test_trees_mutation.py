"""Functions that mutate their inputs."""

from __future__ import annotations

import torch
from parity import FLAGS_BY_ADDRESS, OURS, WHOLE_GRAPH, Context, ParityTestCase, first_is, in_parity, marked, run_side
from torch.testing._internal.common_utils import run_tests


class Counter(torch.nn.Module):
    """Counts its calls in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1)
        return x * self.calls


def increased(x: torch.Tensor) -> torch.Tensor:
    x.add_(1)
    return x * 2


def mutating(ctx: Context) -> None:
    f = ctx.compile(increased)
    for _ in range(4):
        x = torch.randn(4, 8, device=ctx.device)
        ctx.record(f(x), x)


class TestTreeMutation(ParityTestCase):
    by_address = True

    def test_mutated_input_is_not_captured(self) -> None:
        parity = self.parity(mutating)
        self.assertEqual(parity.counter("cudagraph_skips"), 1)
        self.assertEqual(parity.tree.recordings, 0)
        self.assertEqual(parity.tree.warned_mutation, (0,))
        lines = [line for _, line in parity.logs]
        self.assertEqual(len(lines), 1)
        self.assertIn("skipping cudagraphs due to mutated inputs (1 instances). Found from", lines[0])
        self.assertIn("x.add_(1)", lines[0])

    @in_parity(config=WHOLE_GRAPH, skips=1, recordings=0)
    def test_mutated_input_of_a_whole_graph(ctx: Context) -> None:
        @ctx.compile
        def f(x: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
            total.add_(x.sum(0))
            return total.sin()

        total = torch.zeros(8, device=ctx.device)
        for _ in range(4):
            ctx.record(f(torch.randn(4, 8, device=ctx.device), total), total)

    @in_parity(skips=0, recordings=1, nodes=lambda nodes: len(nodes[0].mutated_inputs) == 1)
    def test_mutated_buffer_is_captured(ctx: Context) -> None:
        model = Counter().to(ctx.device)
        compiled = ctx.compile(model)
        with torch.no_grad():
            for _ in range(6):
                ctx.record(compiled(torch.randn(3, 4, device=ctx.device)), model.calls)

    @in_parity(skips=0, recordings=1)
    def test_mutated_marked_tensor_is_captured(ctx: Context) -> None:
        @ctx.compile
        def f(cache: torch.Tensor, position: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            cache.index_copy_(0, position, value)
            return cache.sum(0)

        cache = torch.zeros(16, 4, device=ctx.device)
        torch._dynamo.mark_static_address(cache)
        for step in range(6):
            position = torch.tensor([step], device=ctx.device)
            ctx.record(f(cache, position, torch.ones(1, 4, device=ctx.device) * step), cache)

    @in_parity(skips=0, depth=2, nodes=lambda nodes: [len(node.mutated_inputs) for node in nodes] == [0, 1])
    def test_mutated_output_of_an_earlier_recording(ctx: Context) -> None:
        @ctx.compile
        def f(x: torch.Tensor) -> torch.Tensor:
            y = x * 2
            torch._dynamo.graph_break()
            y.add_(1)
            return y

        ctx.call(f, count=5)

    @in_parity(
        skips=1,
        shape=((0, ((1, ()),)),),
        mutation_hints=lambda hints: any(hint for _, function, hint in hints if function == 1),
    )
    def test_mutation_of_outputs_and_then_of_others(ctx: Context) -> None:
        f = ctx.compile(lambda x: x * 2)

        @ctx.compile
        def g(y: torch.Tensor) -> torch.Tensor:
            y.mul_(3)
            return y + 1

        for step in marked(range(9)):
            x = torch.randn(4, 8, device=ctx.device)
            y = f(x) if step not in (4, 5, 7) else x.clone()
            ctx.record(g(y), y)

    def test_mutation_not_supported_by_setting(self) -> None:
        self.assertIsNone(self.parity(mutating, config={"triton.cudagraph_support_input_mutation": False}).tree)

    @in_parity(
        config={"triton.cudagraph_or_error": True},
        by_address=False,
        oracle=False,
        errors=first_is("RuntimeError", "skipping cudagraphs due to mutated inputs"),
    )
    def test_mutation_is_an_error_by_setting(ctx: Context) -> None:
        f = ctx.compile(increased)
        for _ in range(2):
            ctx.raises(f, torch.randn(4, 8, device=ctx.device))

    def test_mutation_is_no_error_with_inputs_by_address(self) -> None:
        """We skip no graph, so nothing raises: the input is mutated in place."""

        def program(ctx: Context) -> None:
            f = ctx.compile(increased)
            for _ in range(4):
                x = torch.randn(4, 8, device=ctx.device)
                before = x.clone()
                ctx.record(f(x) - 2 * (before + 1), x - (before + 1))

        found = run_side(program, OURS, flags=FLAGS_BY_ADDRESS, config={"triton.cudagraph_or_error": True})
        self.assertIsNone(found.crash, found.traceback)
        self.assertEqual(found.tree.recordings, 1)
        for tensor in found.tensors:
            self.assertEqual(tensor.abs().max(), 0)


if __name__ == "__main__":
    run_tests()
