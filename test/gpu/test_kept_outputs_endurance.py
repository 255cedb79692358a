"""Many steps that keep a random half of their outputs for random times: right values, and no growth.

``PYGRAPH_STEPS`` is the number of steps, 10,000 by default. It reads the memory in use of the whole GPU.
"""

from __future__ import annotations

import gc
import os
import random
from collections import defaultdict
from typing import Any

import torch
import torch._inductor.config
from indirection import KeptTestCase
from test_indirection_endurance import gpu_bytes, host_bytes
from torch.testing._internal.common_utils import run_tests

RUNS_ALONE = True  # it reads the GPU's memory in use, which includes that of other processes
STEPS = int(os.environ.get("PYGRAPH_STEPS", "10000"))
MIB = 2**20
LONGEST = 64  # steps that an output is kept


class TestKeptOutputsEndurance(KeptTestCase):
    def setUp(self) -> None:
        super().setUp()
        self.drawn = random.Random(7)
        self.held: defaultdict[int, list[tuple[torch.Tensor, torch.Tensor]]] = defaultdict(list)  # by their last step
        torch.manual_seed(7)

    def keep(self, step: int, outputs: Any) -> None:
        """Keeps a random half of the outputs, or views of them, and compares those that were kept until this step."""
        for output in outputs:
            if self.drawn.random() < 0.5:
                kept = output[1:] if self.drawn.random() < 0.3 else output
                self.held[step + self.drawn.randrange(LONGEST)].append((kept, kept.clone()))
        found = self.held.pop(step, [])
        if found:
            same = torch.stack([(kept == wanted).all() for kept, wanted in found])
            self.assertTrue(bool(same.all()), f"step {step}: an output has changed")

    def assertSteady(self, step: Any) -> None:
        """After a tenth of the steps, memory does not grow."""
        first = max(4 * LONGEST, STEPS // 10)
        for number in range(first):
            step(number)
        before = self.in_use()
        for number in range(first, STEPS):
            step(number)
        after = self.in_use()
        for name, value in after.items():
            self.assertLess(value - before[name], 8 * MIB, f"{name}: {before} -> {after}")

    def in_use(self) -> dict[str, int]:
        gc.collect()
        torch.cuda.synchronize()
        held = sum(
            kept.untyped_storage().nbytes() + wanted.nbytes for some in self.held.values() for kept, wanted in some
        )
        allocated = torch.cuda.memory_allocated() - held
        return {"allocated": allocated, "GPU": gpu_bytes(), "host": host_bytes()}

    def test_inference(self) -> None:
        weight = torch.randn(32, 32, device=self.device)
        graphed = torch.compile(lambda x: (x @ weight, (x + 1).sin(), x.sum(0)), mode="reduce-overhead")

        def step(number: int) -> None:
            with torch.no_grad():
                self.keep(number, graphed(torch.randn(16, 32, device=self.device)))

        self.assertSteady(step)

    def test_training(self) -> None:
        layer = torch.nn.Linear(32, 32, device=self.device)
        graphed = torch.compile(lambda x: layer(x).tanh().square().mean(1), mode="reduce-overhead")

        def step(number: int) -> None:
            layer.zero_grad()
            loss = graphed(torch.randn(16, 32, device=self.device))
            loss.sum().backward()
            gradients = [parameter.grad for parameter in layer.parameters()]
            self.keep(number, [loss.detach(), *gradients])

        self.assertSteady(step)


if __name__ == "__main__":
    run_tests()
