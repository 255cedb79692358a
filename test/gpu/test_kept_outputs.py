"""Outputs that outlive their step keep their values, without clones or step marks; eager is the oracle."""

from __future__ import annotations

import copy
import ctypes
import gc
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch._dynamo
import torch._inductor.config
import user_operators
from indirection import KeptTestCase
from test_trees_concurrency import in_thread, with_own_manager
from torch.testing._internal.common_utils import instantiate_parametrized_tests, parametrize, run_tests

import pygraph_trees
from pygraph_trees.cuda.extent import copy_bits
from pygraph_trees.native import binding
from pygraph_trees.outputs import allocations


class OnStack(ctypes.Structure):
    _fields_ = (("words", ctypes.c_uint64 * 8192),)


def copied_after_stale_words(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Copies, with a target's address all over the stack; the kernel's parameters have it where they are not filled."""
    ignores = ctypes.CDLL(None).getpid
    ignores.argtypes = [OnStack]
    ignores(OnStack((ctypes.c_uint64 * 8192)(*[targets[0].data_ptr()] * 8192)))
    copy_bits(targets, sources)


class Kept(KeptTestCase):
    def setUp(self) -> None:
        super().setUp()
        torch.manual_seed(0)

    def layers(self, depth: int = 3) -> torch.nn.Module:
        pairs = [m for _ in range(depth) for m in (torch.nn.Linear(64, 64), torch.nn.ReLU())]
        return torch.nn.Sequential(*pairs).to(self.device)

    def some(self, *shape: int) -> torch.Tensor:
        return torch.randn(*(shape or (16, 64)), device=self.device)

    def close(self, found: torch.Tensor, wanted: torch.Tensor, where: object = "") -> None:
        self.assertEqual(found, wanted, atol=1e-5, rtol=1e-5, msg=lambda text: f"{where}: {text}")

    def functions(self) -> list[Any]:
        return list(pygraph_trees.report().functions)


@instantiate_parametrized_tests
class TestInference(Kept):
    def test_all_outputs_of_a_loop(self) -> None:
        model = self.layers().eval()
        graphed, kept = self.graphed(model), []
        with torch.no_grad():
            for _ in range(60):
                x = self.some()
                kept.append((graphed(x), model(x)))
        for call, (found, wanted) in enumerate(kept):
            self.close(found, wanted, call)
        (function,) = self.functions()
        self.assertEqual((len(function.recordings), function.replays, function.ungraphed_calls), (1, 58, 0))
        recording = function.recordings[0]
        self.assertEqual([(i.kind, i.route) for i in recording.inputs if i.kind == "output"], [("output", "patch")])
        self.assertEqual(recording.copied_bytes, 0)
        # Only the warm-up's, which was in the pool, is copied.
        self.assertEqual([(output.number, output.times) for output in function.moved_outputs], [(0, 1)])

    def fast_replays(self) -> int:
        """The total number of replays that C++ made without Python."""
        fast: int = binding.extension.counts()[1]
        return fast

    def assertHandedOut(self, function: Any, outputs: int, *, copied: bool) -> None:
        """All outputs of the newest recording have own memory, and calls that leave them alive replay it."""
        newest = function.recordings[-1]
        self.assertEqual([i.route for i in newest.inputs if i.kind == "output"], ["patch"] * outputs)
        self.assertEqual([output.copied_bytes > 0 for output in newest.outputs], [copied] * outputs)
        self.assertLessEqual(max(output.times for output in function.moved_outputs), 4)
        self.assertEqual((len(function.recordings), function.ungraphed_calls, newest.copied_bytes), (2, 0, 0))
        self.assertGreater(newest.replays, 30)

    @parametrize("name", ["attention", "topk"])
    @parametrize("copied", [copy_bits, copied_after_stale_words])
    def test_outputs_that_a_library_allocates(self, name: str, copied: Callable[..., None]) -> None:
        """The graph copies them once they have outlived two steps."""
        fn: Callable[[torch.Tensor], tuple[torch.Tensor, ...]] = {
            "attention": lambda x: (torch.nn.functional.scaled_dot_product_attention(x, x * 2, x + 1),),
            "topk": lambda x: tuple(torch.topk(x * 2, 5)),
        }[name]
        graphed, kept, before = self.graphed(fn), [], 0
        copies = mock.patch.object(allocations, "copy_bits", copied)
        with copies, torch.inference_mode() if name == "topk" else torch.no_grad():
            for call in range(40):
                x = self.some(2, 4, 32, 32)
                before = self.fast_replays() if call == 30 else before
                kept.append((graphed(x), fn(x)))
        self.assertEqual(self.fast_replays() - before, 10)
        for call, (found, wanted) in enumerate(kept):
            for one, other in zip(found, wanted, strict=True):
                self.assertEqual(one, other, atol=2e-3, rtol=2e-3, msg=f"call {call}")
        (function,) = self.functions()
        self.assertHandedOut(function, len(kept[0][0]), copied=True)

    def test_outputs_of_the_second_of_two_partitions(self) -> None:
        def fn(x: torch.Tensor) -> torch.Tensor:
            return user_operators.cloned(x.sin()).sum(0)

        config = {"custom_should_partition_ops": ["pygraph_indirection_test::cloned"]}
        with torch._inductor.config.patch(config), torch.no_grad():
            graphed, kept = self.graphed(fn), []
            for _ in range(40):
                x = self.some()
                kept.append((graphed(x), fn(x)))
        for call, (found, wanted) in enumerate(kept):
            self.close(found, wanted, call)
        first, second = sorted(self.functions(), key=lambda function: function.partition)
        self.assertEqual((first.partitions, first.ungraphed_calls), (2, 0))
        self.assertHandedOut(second, 1, copied=False)

    def test_raw_addresses_of_outputs_that_are_handed_out(self) -> None:
        """Other libraries hold an output's memory without its storage."""
        model = self.layers().eval()
        graphed, kept = self.graphed(model), []
        with torch.no_grad():
            for _ in range(3):
                graphed(self.some())
            for _ in range(6):
                x = self.some()
                output, wanted = graphed(x), model(x)
                interface = SimpleNamespace(__cuda_array_interface__=output.__cuda_array_interface__)
                other = torch.as_tensor(interface, device=self.device)
                address = output.__cuda_array_interface__["data"][0]
                kept.append((torch.from_dlpack(output), other, output, address, wanted))
        for from_dlpack, other, output, address, wanted in kept:
            self.close(from_dlpack, wanted)
            self.close(other, wanted)
            self.assertEqual(address, output.data_ptr())

    def test_a_tensor_that_the_first_call_caches_on_its_module(self) -> None:
        class Module(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.weight = torch.nn.Parameter(torch.randn(64, 64))
                self.cache: torch.Tensor | None = None

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                if self.cache is None:
                    self.cache = self.weight * 2 + 1
                return x @ self.weight + self.cache

        with torch.no_grad():
            module = Module().to(self.device)
            graphed, cached = self.graphed(module), module.weight * 2 + 1
            for call in range(8):
                x = self.some(64, 64)
                self.close(graphed(x), x @ module.weight + cached, call)

    def test_a_block_that_is_called_many_times_in_a_step(self) -> None:
        def fn(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
            return torch.relu(torch.nn.functional.linear(x, weight, bias)) + x

        blocks, graphed = [torch.nn.Linear(64, 64).to(self.device) for _ in range(12)], self.graphed(fn)
        with torch.no_grad():
            for step in range(6):
                found = wanted = self.some()
                for block in blocks:
                    found = graphed(found, block.weight, block.bias)
                    wanted = fn(wanted, block.weight, block.bias)
                self.close(found, wanted, step)
        (function,) = self.functions()
        self.assertLessEqual(len(function.recordings), 2)
        self.assertEqual((function.recordings[-1].copied_bytes, function.ungraphed_calls), (0, 0))

    def test_outputs_after_their_function_is_gone(self) -> None:
        model = self.layers().eval()
        with torch.no_grad():
            graphed, outputs = self.graphed(model), []
            for _ in range(5):
                x = self.some()
                outputs.append((graphed(x), model(x)))
            torch._dynamo.reset()
            del graphed
            gc.collect()
            torch.cuda.empty_cache()
            others = [torch.full((1 << 20,), 7.0, device=self.device) for _ in range(8)]
            for found, wanted in outputs:
                self.close(found, wanted)
            del others

    def test_an_output_without_elements(self) -> None:
        graphed = self.graphed(lambda x: (x * 2, torch.zeros(0, 3, device=x.device)))
        for call in range(5):
            x = self.some()
            doubled, empty = graphed(x)
            self.assertEqual((doubled, empty.shape), (x * 2, torch.Size([0, 3])), call)
            torch.add(torch.ones(3, device=self.device), 1, out=empty)  # gives it elements
        (function,) = self.functions()
        self.assertEqual((len(function.recordings), function.ungraphed_calls), (1, 0))

    def test_outputs_on_another_stream_whose_function_is_gone(self) -> None:
        """They are moved after the replay that is still queued, and before they are read on its stream."""
        model, stream = self.layers().eval(), torch.cuda.Stream()
        with torch.no_grad():
            graphed = self.graphed(model)
            with torch.cuda.stream(stream):
                for _ in range(5):
                    graphed(self.some())  # dropped, so outputs stay in the pool
                x = self.some()
                wanted = model(x)
                torch.cuda._sleep(400_000_000)  # cycles: some 0.2 s
                found = graphed(x)
            torch._dynamo.reset()
            del graphed
            gc.collect()
            with torch.cuda.stream(stream):
                self.close(found, wanted)

    def test_outputs_of_a_thread_that_has_ended(self) -> None:
        model, kept = self.layers().eval(), []
        functions = [self.graphed(model)]

        def work() -> None:
            with torch.no_grad():
                for _ in range(5):
                    x = self.some()
                    kept.append((functions[0](x), model(x)))

        for _ in range(3):
            self.assertIsNone(in_thread(with_own_manager(work, resets=False)))
        work()
        torch._dynamo.reset()
        functions.clear()
        gc.collect()
        others = [torch.full((1 << 20,), 7.0, device=self.device) for _ in range(8)]
        for call, (found, wanted) in enumerate(kept):
            self.close(found, wanted, call)
        self.assertEqual(len(kept), 20)
        del others

    def test_under_verification(self) -> None:
        model = self.layers().eval()
        with torch._inductor.config.patch({"triton.pygraph_verify": "on"}), torch.no_grad():
            graphed, kept = self.graphed(model), []
            for _ in range(12):
                x = self.some()
                kept.append((graphed(x), model(x)))
        for found, wanted in kept:
            self.close(found, wanted)


@instantiate_parametrized_tests
class TestTraining(Kept):
    def both(self) -> tuple[torch.nn.Module, torch.nn.Module]:
        model = self.layers()
        return model, copy.deepcopy(model)

    def test_forwards_without_a_backward(self) -> None:
        """A loop without ``no_grad``: at each call, the last outputs are alive, and may have a backward."""
        model, eager = self.both()
        graphed, kept = self.graphed(model), None
        for call in range(60):
            x = self.some()
            kept = graphed(x), eager(x)
            self.close(kept[0], kept[1], call)
        kept[0].square().mean().backward()
        kept[1].square().mean().backward()
        for one, other in zip(model.parameters(), eager.parameters(), strict=True):
            self.close(one.grad, other.grad)
        (function,) = (found for found in self.functions() if found.mode == "forward")
        self.assertLess(len(function.recordings), 40)
        self.assertGreater(sum(recording.replays for recording in function.recordings), 10)

    def test_a_compiled_optimizer_step_with_kept_gradients(self) -> None:
        model, eager = self.both()
        graphed = self.graphed(model)
        ours, theirs = (
            torch.optim.AdamW(m.parameters(), lr=torch.tensor(1e-3, device=self.device), capturable=True)
            for m in (model, eager)
        )
        step = self.graphed(ours.step)
        for number in range(10):
            x = self.some()
            graphed(x).square().mean().backward()
            eager(x).square().mean().backward()
            step()
            theirs.step()
            kept = [parameter.grad for parameter in model.parameters()]
            for found, other in zip(kept, eager.parameters(), strict=True):
                self.close(found, other.grad, number)
            ours.zero_grad()
            theirs.zero_grad()
            for one, other in zip(model.parameters(), eager.parameters(), strict=True):
                self.close(one, other, number)

    @parametrize("partitioned", [False, True])
    def test_one_gradient_of_two_parameters_that_is_accumulated(self, partitioned: bool) -> None:
        def loss(x: torch.Tensor, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
            return ((one + other) * x).sum()

        with torch._inductor.config.patch(graph_partition=partitioned):
            graphed, total = self.graphed(loss), torch.zeros_like(self.some())
            leaves = [self.some().requires_grad_() for _ in range(2)]
            for call in range(12):
                graphed(x := self.some(), *leaves).backward()
                total += x
                for leaf in leaves:
                    self.close(leaf.grad, total, call)

    def test_outputs_of_a_forward(self) -> None:
        """Outputs that outlive two steps get own memory, although a call of the same function is under way."""
        model, eager = self.both()
        graphed, kept = self.graphed(model), []
        for step in range(12):
            x = self.some()
            kept.append((graphed(x), eager(x)))
            for output in kept[-1]:
                output.square().mean().backward()
            for one, other in zip(model.parameters(), eager.parameters(), strict=True):
                self.close(one.grad, other.grad, step)
                one.grad = other.grad = None
        for step, (found, wanted) in enumerate(kept):
            self.close(found, wanted, step)
        (forward,) = [function for function in self.functions() if function.mode == "forward"]
        newest = forward.recordings[-1]
        self.assertEqual([(i.kind, i.route) for i in newest.inputs if i.kind == "output"], [("output", "patch")])
        self.assertEqual((newest.copied_bytes, forward.ungraphed_calls), (0, 0))


if __name__ == "__main__":
    run_tests()
