"""Compiled functions that accumulate their gradients themselves, on a GPU: streams, kept gradients, and a library."""

from __future__ import annotations

import copy
import importlib.util
import unittest
from collections.abc import Callable
from typing import Any

import torch
from indirection import ROOT, IndirectionTestCase, KeptTestCase
from new_program import printed
from packages import is_torchvision_broken
from torch import nn
from torch._inductor import config
from torch.testing._internal.common_utils import run_tests

from pygraph_trees.native import binding
from pygraph_trees.trees.hooks import backward_edges

ENTRY = "triton.pygraph_entry"
CALLS = 10
WAITS = 200_000_000  # cycles: over 0.1 s

EXAMPLES = ROOT / "tools" / "examples"
PROGRAM = """
import json, sys
import pygraph_trees, works_with
from pygraph_trees.trees.hooks import backward_edges

print()
print(json.dumps([works_with.run(sys.argv[1], "cuda")["values"], backward_edges.counts()[0]]))
"""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return x


def gradients_of(model: nn.Module) -> list[torch.Tensor | None]:
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def batches(device: torch.device) -> list[torch.Tensor]:
    torch.manual_seed(1)
    return [torch.randn(16, 64, device=device) for _ in range(CALLS)]


@unittest.skipIf(binding.extension is None, "not built for this torch")
class TestGradients(KeptTestCase):
    """Outputs are kept: gradients are the recordings' own tensors, or own memory."""

    def test_gradients_that_are_held_over_steps_keep_their_values(self) -> None:
        model = Block().to(self.device)
        call = self.graphed(model)
        held: list[tuple[list[torch.Tensor], list[torch.Tensor]]] = []
        before = backward_edges.counts()[0]
        for batch in batches(self.device):
            model.zero_grad()
            call(batch).square().mean().backward()
            found = [p.grad for p in model.parameters() if p.grad is not None]
            held.append((found, [gradient.clone() for gradient in found]))
        torch.cuda.synchronize()
        self.assertEqual(len({gradient.data_ptr() for found, _ in held for gradient in found}), CALLS * 12)
        for found, values in held:
            self.assertEqual(found, values, atol=0, rtol=0)
        self.assertEqual(backward_edges.counts()[0] - before, CALLS)

    def test_a_gradient_that_a_hook_keeps_is_not_changed_with_the_parameters(self) -> None:
        """The hook is put on once the backward has begun."""
        model = Block().to(self.device)
        call, weight = self.graphed(model), model.layers[3].weight
        before = backward_edges.counts()[0]
        for batch in batches(self.device):
            model.zero_grad()
            seen: list[torch.Tensor] = []
            handles: list[Any] = []
            unpack = lambda t, s=seen, h=handles: h.append(weight.register_hook(lambda g: s.append(g))) or t  # noqa: E731
            out = call(batch)
            with torch.autograd.graph.saved_tensors_hooks(lambda t: t, unpack):  # a hook would keep the edges in place
                out.square().mean().backward()
            weight._backward_hooks = None  # a dictionary without hooks would count as one
            (gradient,) = seen
            wanted = gradient.clone()
            self.assertEqual(weight.grad, wanted, atol=0, rtol=0)
            weight.grad.mul_(100)
            self.assertEqual(gradient, wanted, atol=0, rtol=0)
        self.assertEqual(backward_edges.counts()[0] - before, CALLS)


@unittest.skipIf(binding.extension is None, "not built for this torch")
class TestStreams(KeptTestCase):
    def steps(self, model: nn.Module, call: Callable[..., torch.Tensor], stream: torch.cuda.Stream) -> list[Any]:
        """Gradients that the current stream reads as soon as ``backward`` returns, while the other stream is late."""
        found = []
        for batch in batches(self.device):
            model.zero_grad()
            torch.cuda.synchronize()
            with torch.cuda.stream(stream):
                loss = call(batch).square().mean()
                torch.cuda._sleep(WAITS)
            loss.backward()
            found.append(gradients_of(model))
            del loss
        return found

    def test_a_backward_on_the_stream_of_its_forward(self) -> None:
        """The engine lets the caller's stream wait for the streams of leaves, and must learn of this one."""
        model = Block().to(self.device)
        eager, stream = copy.deepcopy(model), torch.cuda.Stream()
        before = backward_edges.counts()[0]
        found = self.steps(model, self.graphed(model), stream)
        self.assertEqual(backward_edges.counts()[0] - before, CALLS)
        self.assertEqual(found, self.steps(eager, eager, stream), atol=1e-5, rtol=1e-4)

    def test_existing_gradients_on_another_stream(self) -> None:
        model = Block().to(self.device)
        eager, call = copy.deepcopy(model), self.graphed(model)
        for run in (call, eager):
            for i, batch in enumerate(batches(self.device)):
                stream = torch.cuda.Stream() if i % 2 else torch.cuda.current_stream()
                stream.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(stream):
                    run(batch).square().mean().backward()
                torch.cuda.current_stream().wait_stream(stream)
        self.assertEqual(gradients_of(model), gradients_of(eager), atol=1e-5, rtol=1e-4)

    def test_parameters_on_the_cpu(self) -> None:
        """Their gradients are left to the engine, which has another thread for them."""

        class Mixed(Block):
            def __init__(self) -> None:
                super().__init__()
                self.scales = nn.ParameterList(nn.Parameter(torch.tensor(1.0 + i)) for i in range(3))

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return super().forward(x) * sum(self.scales)

        model = Mixed()
        model.layers.to(self.device)
        eager, call = copy.deepcopy(model), self.graphed(model)
        before = backward_edges.counts()[0]
        for batch in batches(self.device):
            for way, run in ((model, call), (eager, eager)):
                way.zero_grad()
                run(batch).square().mean().backward()
            self.assertEqual(gradients_of(model), gradients_of(eager), atol=1e-5, rtol=1e-4)
        self.assertEqual(backward_edges.counts()[0] - before, CALLS)

    def test_a_peak_no_higher_than_the_engines(self) -> None:
        """Saved tensors are released before gradients are added, as the engine does."""
        model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(12))).to(self.device)
        peaks = {}
        for entry in ("off", "short"):
            torch._dynamo.reset()
            with config.patch({ENTRY: entry, "triton.pygraph_selective": "never"}):
                call = self.graphed(model)
                for _ in range(4):
                    torch.cuda.reset_peak_memory_stats()
                    call(torch.ones(2048, 512, device=self.device)).sum().backward()
                peaks[entry] = torch.cuda.max_memory_allocated()
            model.zero_grad()
        self.assertLessEqual(peaks["short"], peaks["off"] * 1.01)


def _has(*packages: str) -> bool:
    return all(importlib.util.find_spec(package) is not None for package in packages) and not is_torchvision_broken()


@unittest.skipIf(binding.extension is None, "not built for this torch")
class TestLibraries(IndirectionTestCase):
    """Loops of libraries, from tools/examples/works_with.py."""

    def losses(self, name: str, entry: str, least: int) -> list[float]:
        """From a process of its own: libraries set torch's global flags, which tests may not."""
        values: list[float]
        values, taken = printed(PROGRAM, name, folders=(EXAMPLES,), PYGRAPH_ENTRY=entry)
        self.assertTrue(taken >= least if entry == "short" else taken == 0, taken)
        return values

    @unittest.skipUnless(_has("transformers", "accelerate"), "needs transformers and accelerate")
    def test_trainer(self) -> None:
        off, short = (self.losses("trainer", entry, 10) for entry in ("off", "short"))
        self.assertEqual(short, off, atol=1e-5, rtol=1e-4)


if __name__ == "__main__":
    run_tests()
