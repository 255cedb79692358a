"""Changes that a program makes to outputs that it drops or keeps; eager is the oracle.

Outputs of a training forward and gradients are cached tensors, which torch returns again once they are no longer held.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch
from indirection import KeptTestCase
from torch.testing._internal.common_utils import instantiate_parametrized_tests, parametrize, run_tests
from torch.utils.weak import WeakTensorKeyDictionary

import pygraph_trees

STEPS = 12


class TestTouchedOutputs(KeptTestCase):
    def setUp(self) -> None:
        super().setUp()
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 8)).to("cuda")
        self.graphed = torch.compile(self.model, mode="reduce-overhead")

    def check_steps(self, step: Callable[[Callable[..., Any], torch.Tensor], list[torch.Tensor]]) -> None:
        """Takes the same steps with the compiled model and with eager."""
        for number in range(STEPS):
            x = torch.randn(16, 64, device=self.device)
            found, wanted = step(self.graphed, x), step(self.model, x)
            self.assertEqual(len(found), len(wanted))
            for one, other in zip(found, wanted, strict=True):
                self.assertEqual(one, other, atol=1e-5, rtol=1e-5, msg=lambda text: f"step {number}: {text}")  # noqa: B023
        self.assertGreater(sum(function.replays for function in pygraph_trees.report().functions), 0)

    def gradients(self) -> list[torch.Tensor]:
        found = [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]
        self.model.zero_grad()
        return found

    def test_outputs_that_retain_their_gradients(self) -> None:
        def step(call: Callable[..., Any], x: torch.Tensor) -> list[torch.Tensor]:
            out = call(x)
            out.retain_grad()
            out.square().sum().backward()
            return [out.grad, *self.gradients()]

        self.check_steps(step)

    def test_sums_that_are_remembered_by_output(self) -> None:
        sums: Any = WeakTensorKeyDictionary()

        def step(call: Callable[..., Any], x: torch.Tensor) -> list[torch.Tensor]:
            out = call(x)
            if out not in sums:
                sums[out] = out.detach().sum()
            out.sum().backward()
            return [sums[out], *self.gradients()]

        self.check_steps(step)

    @parametrize("is_kept", [False, True])
    def test_gradients_with_other_memory(self, is_kept: bool) -> None:
        """Some optimizers convert or average gradients through ``.data`` in this way."""
        kept: dict[int, list[list[torch.Tensor]]] = {}  # by way

        def step(call: Callable[..., Any], x: torch.Tensor) -> list[torch.Tensor]:
            call(x).square().mean().backward()
            for parameter in self.model.parameters():
                assert parameter.grad is not None
                parameter.grad.data = parameter.grad.data * 2
            found = self.gradients()
            if not is_kept:
                return found
            of_this_way = kept.setdefault(id(call), [])
            of_this_way.append(found)
            del of_this_way[:-3]
            return [gradient for one in of_this_way for gradient in one]

        self.check_steps(step)

    def test_a_gradient_whose_storage_alone_is_kept(self) -> None:
        for number in range(STEPS):
            x, storages, wanted = torch.randn(16, 64, device=self.device), [], []
            self.graphed(x).sum().backward()
            for gradient in self.gradients():
                storages.append((gradient.untyped_storage(), gradient.shape, gradient.stride()))
                wanted.append(gradient.clone())
            del gradient
            gc.collect()
            self.graphed(x * 2).sum().backward()
            self.gradients()
            for (storage, shape, stride), other in zip(storages, wanted, strict=True):
                found = torch.empty(0, device=self.device).set_(storage, 0, shape, stride)
                self.assertEqual(found, other, atol=0, rtol=0, msg=f"step {number}")

    def test_shapes_that_are_changed_in_place(self) -> None:
        def step(call: Callable[..., Any], x: torch.Tensor) -> list[torch.Tensor]:
            call(x).sum().backward()
            for parameter in self.model.parameters():
                assert parameter.grad is not None
            found = self.gradients()
            for gradient in found:
                gradient.unsqueeze_(0)
            return found

        self.check_steps(step)


class TestBlocksOfAStep(KeptTestCase):
    @parametrize("calls", [4, 12])
    def test_a_block_that_a_training_step_calls_many_times_is_decided(self, calls: int) -> None:
        """The function's trial ends, and then C++ replays it."""
        block = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Tanh()).to("cuda")
        graphed = torch.compile(block, mode="reduce-overhead")
        with torch._inductor.config.patch({"triton.pygraph_selective": "auto"}):
            for number in range(80):
                x = torch.randn(8, 32, device=self.device)
                results = []
                for way in (graphed, block):
                    y = x
                    for _ in range(calls):
                        y = way(y)
                    y.square().mean().backward()
                    results.append([parameter.grad for parameter in block.parameters()])
                    block.zero_grad()
                self.assertEqual(results[0], results[1], atol=1e-5, rtol=1e-4, msg=f"step {number}")
        for function in pygraph_trees.report().functions:
            self.assertIsNotNone(function.decision)


instantiate_parametrized_tests(TestTouchedOutputs)
instantiate_parametrized_tests(TestBlocksOfAStep)

if __name__ == "__main__":
    run_tests()
