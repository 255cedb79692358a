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

    @parametrize("of", ["outputs", "gradients"])
    @parametrize("change", ["version", "names", "swap", "grow", "empty", "lazy"])
    def test_memory_and_properties_as_of_other_tensors(self, of: str, change: str) -> None:
        """The program drops each tensor that it changed, and keeps what it made of it for three steps."""
        if change == "names" and not hasattr(torch.Tensor, "rename_"):
            self.skipTest("this torch has no names")
        kept: dict[int, list[torch.Tensor]] = {}  # by way

        def step(call: Callable[..., Any], x: torch.Tensor) -> list[torch.Tensor]:
            output = call(x)
            output.square().sum().backward()
            gradients = self.gradients()
            tensors = [output.detach()] if of == "outputs" else gradients
            del output
            of_this_way = kept.setdefault(id(call), [])
            for tensor in tensors:
                of_this_way.append(changed(tensor, change))
            del of_this_way[:-6], tensor
            return [*of_this_way, *gradients] if change in ("version", "lazy") else of_this_way

        self.check_steps(step)

    def test_outputs_begin_with_a_new_version(self) -> None:
        for step in range(STEPS):
            output = self.graphed(torch.randn(16, 64, device=self.device))
            output.sum().backward()
            gradients = self.gradients()
            if step > 3:  # first outputs are as generated code leaves them
                self.assertEqual([tensor._version for tensor in (output, *gradients)], [0] * (1 + len(gradients)))
            with torch.no_grad():
                for tensor in (output.detach(), *gradients):
                    tensor.mul_(2)
            del output, gradients, tensor

    def test_outputs_of_inference_that_are_swapped_and_resized(self) -> None:
        """The tensor that a call returns is an own one, whose storage the program may resize."""
        with torch.no_grad():

            def step(call: Callable[..., Any], x: torch.Tensor) -> list[torch.Tensor]:
                first, other = call(x), torch.zeros(3, device=self.device)
                torch.utils.swap_tensors(first, other)
                second = call(x + 1)
                second.resize_(32, 8)[16:] = 1
                return [first, other, second, call(x + 2)]

            self.check_steps(step)


def changed(tensor: torch.Tensor, change: str) -> torch.Tensor:
    """Changes a tensor, and returns what the program keeps: the tensor's former memory, or another one."""
    if change == "version":
        return tensor.mul_(2).clone()
    if change == "names":
        return tensor.rename_(*(f"d{number}" for number in range(tensor.dim()))).rename(None).clone()
    if change == "swap":
        other = torch.zeros(3, device=tensor.device)
        torch.utils.swap_tensors(tensor, other)
        return other
    if change == "grow":
        tensor.resize_(2 * tensor.numel())[tensor.numel() // 2 :] = 3
        return tensor
    if change == "empty":
        tensor.untyped_storage().resize_(0)
        return torch.zeros(1, device=tensor.device)
    return torch._lazy_clone(tensor)


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
