"""Programs that would be recorded again and again, or keep all outputs: few recordings, calls of equal length."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import torch
from indirection import Facts, KeptTestCase, assert_same_bits, compiled
from selection import decided
from torch import nn
from torch.testing._internal.common_utils import instantiate_parametrized_tests, parametrize, run_tests

from pygraph_trees.selection.decision import Execution
from pygraph_trees.trees.managers import storms

SETTLED = 10  # steps after which outputs have the memory that they keep


def perceptron(layers: int, width: int) -> nn.Module:
    """A network with two parameters a layer."""
    torch.manual_seed(0)
    return nn.Sequential(*(m for _ in range(layers) for m in (nn.Linear(width, width), nn.Tanh())))


class Halves(nn.Module):
    """Two functions, each with half of the parameters, and a buffer that never moves."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.first, self.second = perceptron(layers // 2, width), perceptron(layers // 2, width)
        self.register_buffer("scale", torch.full((width,), 0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x) * self.scale
        torch._dynamo.graph_break()
        return self.second(h)


def by_data(module: nn.Module, name: str, new: torch.Tensor) -> None:
    getattr(module, name).data = new


def by_set(module: nn.Module, name: str, new: torch.Tensor) -> None:
    with torch.no_grad():
        getattr(module, name).set_(new)


def by_storage(module: nn.Module, name: str, new: torch.Tensor) -> None:
    with torch.no_grad():
        getattr(module, name).set_(new.untyped_storage(), 0, new.shape, new.stride())


class TestParametersThatMove(KeptTestCase):
    """One parameter is replaced at each step."""

    def setUp(self) -> None:
        super().setUp()
        patch = torch._inductor.config.patch({"triton.pygraph_selective": "always"})
        self.enterContext(patch)

    def step(self, way: Callable[..., torch.Tensor], model: nn.Module, x: torch.Tensor, *, trained: bool) -> list:
        with torch.set_grad_enabled(trained):
            output = way(x)
            results = [output.detach().clone()]
            if trained:
                output.square().mean().backward()
                results += [p.grad.clone() for p in model.parameters()]
                model.zero_grad(set_to_none=True)
        return results

    def check(self, model: nn.Module, width: int, replace: Callable[..., None], *, trained: bool) -> None:
        models = [model.to(self.device), copy.deepcopy(model).to(self.device)]
        ways = [compiled(models[0]).plain, compiled(models[1]).graphed]
        names = [name for name, _ in model.named_parameters()]
        before = None
        for call in range(SETTLED + len(names) + 4):
            results = []
            if call == SETTLED:
                before = Facts.now()
            x = torch.randn(8, width, device=self.device)
            for way, owner in zip(ways, models, strict=True):
                if SETTLED <= call < SETTLED + len(names):
                    path, _, name = names[call - SETTLED].rpartition(".")
                    module = owner.get_submodule(path)
                    replace(module, name, getattr(module, name).detach() * 1.5)
                results.append(self.step(way, owner, x, trained=trained))
            assert_same_bits(results[1], results[0], f"call {call}: ")
        facts = Facts.now()
        self.assertEqual(facts.functions, before.functions)
        self.assertLessEqual(facts.recordings - before.recordings, 2 * facts.functions, str(facts))
        self.assertEqual((facts.copied_bytes, facts.ungraphed_calls), (0, 0), str(facts))

    @parametrize("trained", [False, True])
    @parametrize("replace", [by_data, by_set, by_storage], name_fn=lambda replace: replace.__name__)
    def test_one_function(self, replace, trained):
        self.check(perceptron(24, 32), 32, replace, trained=trained)

    @parametrize("trained", [False, True])
    def test_two_functions(self, trained):
        self.check(Halves(12, 96), 96, by_data, trained=trained)

    def test_one_parameter_alone_leaves_the_others_static(self):
        model = perceptron(4, 64).to(self.device)
        ways = compiled(model)
        with torch.no_grad():
            for call in range(SETTLED + 6):
                if call >= SETTLED:
                    model[0].weight.data = model[0].weight.data.clone()
                x = torch.randn(8, 64, device=self.device)
                assert_same_bits(ways.graphed(x), ways.plain(x), f"call {call}: ")
        self.assertEqual(Facts.now().recordings, 2)


class TestChains(KeptTestCase):
    """Forwards whose backward never comes. Their trials end graphed."""

    def setUp(self) -> None:
        super().setUp()
        self.enterContext(torch._inductor.config.patch({"triton.pygraph_selective": "auto"}))
        self.enterContext(decided(Execution.GRAPHED))

    def cells(self, width: int) -> tuple[list[nn.Module], list[Callable[..., torch.Tensor]]]:
        torch.manual_seed(0)
        models = [nn.RNNCell(width, width, device=self.device)]
        models.append(copy.deepcopy(models[0]))

        def cell(model: nn.Module) -> Callable[..., torch.Tensor]:
            return lambda x, h: torch.tanh(x @ model.weight_ih + h @ model.weight_hh + model.bias_hh)

        return models, [compiled(cell(models[0])).plain, compiled(cell(models[1])).graphed]

    @parametrize("width", [16, 96])
    def test_a_chain_that_is_dropped_is_replayed(self, width):
        _, ways = self.cells(width)
        counts = []
        for chain in range(8):
            ends = []
            for way in ways:
                h = torch.zeros(4, width, device=self.device)
                for step in range(24):
                    h = way(torch.full((4, width), 0.01 * (chain + step), device=self.device), h)
                ends.append(h.detach().clone())
                del h
            assert_same_bits(ends[1], ends[0], f"chain {chain}: ")
            counts.append(Facts.now().recordings)
        self.assertLessEqual(counts[-1], counts[3] + 2, str(counts))

    @parametrize("width", [16, 96])
    def test_a_backward_after_dropped_chains_is_right(self, width):
        models, ways = self.cells(width)
        for chain in range(4):
            gradients = []
            for model, way in zip(models, ways, strict=True):
                h = torch.zeros(4, width, device=self.device)
                for step in range(20):
                    h = way(torch.full((4, width), 0.01 * step, device=self.device), h)
                if chain % 2:
                    h.sum().backward()
                    gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
                    model.zero_grad(set_to_none=True)
                del h
            if gradients:
                self.assertEqual(gradients[1], gradients[0], rtol=1e-4, atol=1e-5, msg=f"chain {chain}")

    @parametrize("holds", ["losses", "the first loss"])
    def test_a_path_that_never_ends_is_not_recorded_for_ever(self, holds):
        self.enterContext(mock.patch.object(storms, "MOST_ON_PATH", 32))
        model = perceptron(2, 32).to(self.device)
        ways = compiled(lambda x: model(x).square().mean())
        losses = []
        for call in range(120):
            x = torch.randn(4, 32, device=self.device)
            losses.append((ways.graphed(x), ways.plain(x)))
            if holds != "losses":
                del losses[1:]
            assert_same_bits(losses[-1][0].detach(), losses[-1][1].detach(), f"call {call}: ")
        assert_same_bits([one.detach() for one, _ in losses], [other.detach() for _, other in losses], "at last: ")
        self.assertLessEqual(Facts.now().recordings, 40, str(Facts.now()))
        one, other = (torch.autograd.grad(loss, list(model.parameters())) for loss in losses[0])
        self.assertEqual(one, other, rtol=1e-4, atol=1e-6)


class TestWhatIsKept(KeptTestCase):
    """The time of a call does not grow with what the program keeps."""

    CALLS, PART = 450, 50

    def check(self, call: Callable[[int], Any], plain: Callable[[int], Any]) -> None:
        """Relative to un-graphed calls beside them, the last third of the calls takes as long as the second third.

        Processor time of this thread: the lane's other processes share the machine. The best part of a third counts.
        """
        parts = []
        for first in range(0, self.CALLS, self.PART):
            times = []
            for fn in (call, plain):
                begin = time.thread_time()
                for number in range(first, first + self.PART):
                    fn(number)
                times.append(time.thread_time() - begin)
                torch.cuda.synchronize()
            parts.append(times[0] / times[1])
        third = len(parts) // 3
        second, last = min(parts[third : 2 * third]), min(parts[2 * third :])
        self.assertLess(last, 1.5 * second, str(parts))

    @parametrize("holder", ["tensor", "view", "with an attribute"])
    def test_a_history_of_outputs(self, holder):
        ways = compiled(lambda x: (x.sin() + 1, x.cumsum(1)))
        kept = []

        def plain(number: int) -> Any:
            return ways.plain(torch.full((16, 24), 0.01 * number, device=self.device))

        def call(number: int) -> None:
            outputs = ways.graphed(torch.full((16, 24), 0.01 * number, device=self.device))
            if holder == "view":
                outputs = [output[1:] for output in outputs]
            elif holder == "with an attribute":
                outputs[0].number = number
            kept.append(outputs)

        with torch.no_grad():
            self.check(call, plain)
            for number, outputs in enumerate(kept):
                wanted = plain(number)
                if holder == "view":
                    wanted = [output[1:] for output in wanted]
                assert_same_bits(list(outputs), list(wanted), f"call {number}: ")

    def test_a_state_that_is_carried_on(self):
        ways = compiled(lambda h, x: torch.tanh(h * 0.9 + x))
        state = [torch.zeros(64, 33, device=self.device)] * 2

        def step(way: Callable[..., Any], which: int, number: int) -> None:
            state[which] = way(state[which], torch.full((64, 33), 0.001 * number, device=self.device))

        with torch.no_grad():
            self.check(partial(step, ways.graphed, 0), partial(step, ways.plain, 1))
        assert_same_bits(state[0], state[1], "")

    def test_many_outputs_of_which_a_few_are_kept(self):
        ways = compiled(lambda x: [x * n + n for n in range(200)])
        kept = []

        def output(way: Callable[..., Any], number: int) -> Any:
            return way(torch.full((8, 8), float(number), device=self.device))[number % 3]

        with torch.no_grad():
            self.check(lambda number: kept.append(output(ways.graphed, number)), partial(output, ways.plain))
            for number, found in enumerate(kept):
                assert_same_bits(found, output(ways.plain, number), f"call {number}: ")


for _tests in (TestParametersThatMove, TestChains, TestWhatIsKept):
    instantiate_parametrized_tests(_tests)

if __name__ == "__main__":
    run_tests()
