"""Changes that a program makes to outputs that it drops or keeps, and outputs that another process shares."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.multiprocessing as mp
from indirection import KeptTestCase
from shared_reader import reader
from torch.testing._internal.common_utils import instantiate_parametrized_tests, parametrize, run_tests
from user_operators import library

import pygraph_trees

STEPS = 12


@instantiate_parametrized_tests
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


FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {"library": library, "generated": lambda x: x.sin() * 2}

CALLS = 4


@instantiate_parametrized_tests
class TestSharedOutputs(KeptTestCase):
    def setUp(self) -> None:
        super().setUp()
        torch.manual_seed(0)

    def some(self) -> torch.Tensor:
        return torch.randn(100, device=self.device)

    @parametrize("name", list(FUNCTIONS))
    @parametrize("what", ["output", "view"])
    def test_shared_memory_is_not_written_again(self, name: str, what: str) -> None:
        fn, graphed, held = FUNCTIONS[name], self.graphed(FUNCTIONS[name], dynamic=False), []
        with torch.no_grad():
            for _ in range(CALLS):
                x = self.some()
                output = graphed(x)
                shared = (output if what == "output" else output[2:]).untyped_storage()
                shared._share_cuda_()
                held.append((shared.data_ptr(), output, fn(x)))
                del output
                for _ in range(2):
                    again = graphed(self.some())
                    self.assertNotEqual(again.untyped_storage().data_ptr(), shared.data_ptr())
                    del again
                for address, output, wanted in held:
                    self.assertEqual((output, output.untyped_storage().data_ptr()), (wanted, address))
                del output

    def test_gradients_that_are_shared(self) -> None:
        model = torch.nn.Linear(32, 8).to(self.device)
        graphed = self.graphed(model, dynamic=False)
        for step in range(CALLS):
            x = torch.randn(16, 32, device=self.device)
            graphed(x).sum().backward()
            shared, wanted = model.weight.grad, x.sum(0, keepdim=True).expand_as(model.weight)
            assert shared is not None
            shared.untyped_storage()._share_cuda_()
            address = shared.data_ptr()
            for _ in range(2):
                model.zero_grad(set_to_none=True)
                graphed(torch.randn(16, 32, device=self.device)).sum().backward()
            self.assertEqual(shared, wanted, atol=1e-3, rtol=1e-3, msg=lambda text: f"step {step}: {text}")  # noqa: B023
            self.assertEqual(shared.data_ptr(), address)
            model.zero_grad(set_to_none=True)

    def test_outputs_that_are_sent_and_dropped(self) -> None:
        context = mp.get_context("spawn")
        tensors, values, wanted = context.Queue(), context.Queue(), []
        process = context.Process(target=reader, args=(tensors, values, len(FUNCTIONS) * CALLS), daemon=True)
        process.start()
        try:
            with torch.no_grad():
                for name, fn in FUNCTIONS.items():
                    graphed = self.graphed(FUNCTIONS[name], dynamic=False)
                    for _ in range(CALLS):
                        x = self.some()
                        output = graphed(x)
                        wanted.append(fn(x))
                        tensors.put(output)
                        del output
                        graphed(self.some())
                self.assertEqual(values.get(timeout=60), "received")
                torch.cuda.synchronize()
                tensors.put("read")
                self.assertEqual(values.get(timeout=60), [tensor.tolist() for tensor in wanted])
                tensors.put("end")
            process.join(30)
        finally:
            process.kill()


if __name__ == "__main__":
    run_tests()
