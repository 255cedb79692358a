"""Forward and backward: gradients, accumulation, pending backwards, inference and training of one module."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch._functorch.config
from parity import WHOLE_GRAPH, Context, ParityTestCase, in_parity, marked
from torch.testing._internal.common_utils import run_tests
from torch.utils.checkpoint import checkpoint


def small_model(device: str) -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4)).to(device)


def gradients(parameters: Iterable[torch.nn.Parameter]) -> list[torch.Tensor | None]:
    return [parameter.grad for parameter in parameters]


class TestTreeTraining(ParityTestCase):
    by_address = True

    def test_forward_and_backward(self) -> None:
        def program(ctx: Context) -> None:
            model = small_model(ctx.device)
            compiled = ctx.compile(model)
            for _ in range(5):
                x = torch.randn(4, 8, device=ctx.device, requires_grad=True)
                y = compiled(x)
                y.square().sum().backward()
                ctx.record(y, x.grad, *gradients(model.parameters()))
                model.zero_grad()

        for config in ({}, WHOLE_GRAPH):
            tree = self.parity(program, config=config).tree
            self.assertEqual(tree.shape, ((0, ((1, ()),)),))
            self.assertEqual(tree.modes, ("FORWARD", "BACKWARD"))
            self.assertFalse(tree.pending_backwards)

    @in_parity(recordings=2)
    def test_accumulation_into_own_gradients(ctx: Context) -> None:
        model = small_model(ctx.device)
        compiled = ctx.compile(model)
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        for step in range(8):
            compiled(torch.randn(4, 8, device=ctx.device)).square().sum().backward()
            if step % 2:
                ctx.record(*gradients(model.parameters()))
                model.zero_grad(set_to_none=False)

    @in_parity(oracle=False, overwritten=True)
    def test_accumulation_into_gradients_of_the_pool(ctx: Context) -> None:
        model = torch.nn.Linear(8, 4, device=ctx.device)
        compiled = ctx.compile(model)
        for step in range(6):
            ctx.raises(lambda: compiled(torch.randn(4, 8, device=ctx.device)).square().sum().backward())
            if step % 2:
                ctx.raises(lambda: [grad + 0 for grad in gradients(model.parameters())])
                model.zero_grad()

    @in_parity(shape=((0, ((0, ((1, ((1, ()),)),)),)),))
    def test_two_forwards_before_their_backward(ctx: Context) -> None:
        model = small_model(ctx.device)
        compiled = ctx.compile(model)
        for _ in marked(range(4)):
            first = compiled(torch.randn(4, 8, device=ctx.device))
            second = compiled(torch.randn(4, 8, device=ctx.device))
            ctx.record(first, second)
            (first.square().sum() + second.square().sum()).backward()
            ctx.record(*gradients(model.parameters()))
            model.zero_grad()

    @in_parity(modes=lambda modes: sorted(modes) == ["BACKWARD", "BACKWARD", "FORWARD", "FORWARD"], depth=4)
    def test_graph_break_in_training(ctx: Context) -> None:
        first, second = torch.nn.Linear(8, 8, device=ctx.device), torch.nn.Linear(8, 4, device=ctx.device)

        @ctx.compile
        def f(x: torch.Tensor) -> torch.Tensor:
            h = first(x).tanh()
            torch._dynamo.graph_break()
            return second(h)

        ctx.train(f, first, second)

    @in_parity(
        pending_backwards=True,
        warned=(0,),
        warnings=lambda found: sum("Unable to hit fast path of CUDAGraphs" in text for _, text in found) == 1,
    )
    def test_forwards_without_backwards_are_warned_of(ctx: Context) -> None:
        model = torch.nn.Linear(8, 4, device=ctx.device)
        compiled = ctx.compile(model)
        held = []
        for _ in range(5):
            held.append(compiled(torch.randn(4, 8, device=ctx.device)))
        ctx.record(*held)

    @in_parity(recordings=1, warnings=lambda found: not any("fast path" in text for _, text in found))
    def test_marked_steps_need_no_backward(ctx: Context) -> None:
        model = torch.nn.Linear(8, 4, device=ctx.device)
        compiled = ctx.compile(model)
        for _ in marked(range(5)):
            ctx.record(compiled(torch.randn(4, 8, device=ctx.device)))

    @in_parity(modes=lambda modes: {*modes} == {"INFERENCE", "FORWARD", "BACKWARD"}, pending_backwards=False)
    def test_inference_then_training_then_inference(ctx: Context) -> None:
        model = small_model(ctx.device)
        compiled = ctx.compile(model)
        for mode in ("inference", "training", "no_grad", "training", "inference"):
            for _ in range(3):
                x = torch.randn(4, 8, device=ctx.device)
                if mode == "training":
                    y = compiled(x)
                    y.square().sum().backward()
                    ctx.record(y, *gradients(model.parameters()))
                    model.zero_grad()
                else:
                    with torch.inference_mode() if mode == "inference" else torch.no_grad():
                        ctx.record(compiled(x))

    @in_parity(least_recordings=3)
    def test_evaluation_between_forward_and_backward(ctx: Context) -> None:
        model = small_model(ctx.device)
        compiled = ctx.compile(model)
        for _ in range(5):
            y = compiled(torch.randn(4, 8, device=ctx.device))
            with torch.no_grad():
                ctx.record(compiled(torch.randn(4, 8, device=ctx.device)))
            y.square().sum().backward()
            ctx.record(y, *gradients(model.parameters()))
            model.zero_grad()

    @in_parity(least_recordings=2)
    def test_two_backwards_of_one_forward(ctx: Context) -> None:
        with torch._functorch.config.patch(donated_buffer=False):
            f = ctx.compile(lambda x: (x * x).sin())
            for _ in range(4):
                x = torch.randn(4, 8, device=ctx.device, requires_grad=True)
                y = f(x).sum()
                (first,) = torch.autograd.grad(y, x, retain_graph=True)
                ctx.record(first)
                (second,) = torch.autograd.grad(y, x)
                ctx.record(second)

    @in_parity(skips=0, recordings=2, nodes=lambda nodes: nodes[0].mutated_inputs)
    def test_batch_norm_updates_its_buffers(ctx: Context) -> None:
        model = torch.nn.BatchNorm1d(8, device=ctx.device)
        compiled = ctx.compile(model)
        # Integers, whose sums are exact in any order.
        weights = (torch.arange(16 * 8, device=ctx.device) % 5).reshape(16, 8).float()
        for _ in range(5):
            (compiled(torch.randn(16, 8, device=ctx.device)) * weights).sum().backward()
            ctx.record(model.running_mean, model.running_var, model.num_batches_tracked, model.bias.grad)
            model.zero_grad()

    @in_parity(recordings=2)
    def test_activation_checkpointing(ctx: Context) -> None:
        model = small_model(ctx.device)
        compiled = ctx.compile(lambda x: checkpoint(model, x, use_reentrant=False))
        ctx.train(compiled, model)

    @in_parity(least_recordings=2)
    def test_compiled_optimizer(ctx: Context) -> None:
        model = torch.nn.Linear(8, 4, device=ctx.device)
        compiled = ctx.compile(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.125)

        @ctx.compile(fullgraph=False)
        def step() -> None:
            optimizer.step()

        for _ in marked(range(5)):
            # One step for both; otherwise the backward's gradients are overwritten before the optimizer reads them.
            compiled(torch.randn(4, 8, device=ctx.device)).square().sum().backward()
            step()
            ctx.record(*model.parameters())
            model.zero_grad()


if __name__ == "__main__":
    run_tests()
