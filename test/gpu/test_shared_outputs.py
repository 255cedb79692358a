"""Outputs whose memory is shared with another process: no later replay writes to it; eager is the oracle."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.multiprocessing as mp
from indirection import KeptTestCase
from shared_reader import reader
from torch.testing._internal.common_utils import instantiate_parametrized_tests, parametrize, run_tests
from user_operators import library

FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {"library": library, "generated": lambda x: x.sin() * 2}

CALLS = 4


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


instantiate_parametrized_tests(TestSharedOutputs)

if __name__ == "__main__":
    run_tests()
