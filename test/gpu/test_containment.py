"""Whatever the graph trees raise about themselves, a program gets un-graphed code's values; eager is the oracle."""

from __future__ import annotations

import contextlib
import gc
import itertools
from collections.abc import Callable
from typing import Any

import injected
import torch
from indirection import KeptTestCase
from test_trees_failures import LEAKED, MOOD, moody, waiting
from torch.testing._internal.common_utils import instantiate_parametrized_tests, parametrize, run_tests

import pygraph_trees
from pygraph_trees.report.summary import clear

FAILED = "CUDA graphs failed"


class ContainmentTestCase(KeptTestCase):
    def setUp(self) -> None:
        super().setUp()
        torch.manual_seed(0)
        MOOD.update(fail="", leak=False)
        LEAKED.clear()

    def graphed(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        compiled: Callable[..., Any] = torch.compile(fn, mode="reduce-overhead", dynamic=False)
        return compiled

    def some(self, *shape: int, **options: Any) -> torch.Tensor:
        return torch.randn(*shape, device=self.device, **options)

    def said(self) -> str:
        """What the report says of functions and recordings."""
        functions = pygraph_trees.report().functions
        recordings = [r for f in functions for r in f.recordings]
        reasons = [f.ungraphed_reason for f in functions] + [r.reason for r in recordings]
        return "\n".join(filter(None, reasons + [i.why_copied for r in recordings for i in r.inputs]))

    def close(self, found: Any, wanted: Any, where: str) -> None:
        self.assertEqual(found, wanted, atol=1e-3, rtol=1e-3, msg=lambda text: f"{where}: {text}")


@instantiate_parametrized_tests
class TestInjected(ContainmentTestCase):
    """A failure at each place where upstream's module raises or asserts."""

    def steps(self, injection: injected.Injection, place: injected.Place, *, is_lasting: bool) -> int:
        """Makes steps of training, and returns how often the place was reached and raised."""
        torch.compiler.reset()
        clear()
        weight = self.some(8, 8, requires_grad=True)

        def first(x: torch.Tensor) -> Any:
            y = torch.tanh(x @ weight)
            return y, y[1:], x.view(-1), None, 3

        def second(y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
            return (y.sin() * 2).sum() + z.cos().sum()

        f, g, kept = self.graphed(first), self.graphed(second), []
        injection.arm(0, is_lasting=False)
        for step in range(9):
            if step == 1:
                injection.arm(place.line, is_lasting=is_lasting)
            x = self.some(4, 8)
            y, part, flat, nothing, three = f(x)
            loss = g(y, part)
            loss.backward()
            where = f"{place}, {'always' if is_lasting else 'once'}, step {step}"
            wanted = torch.tanh(x @ weight)
            total = second(wanted, wanted[1:])
            (gradient,) = torch.autograd.grad(total, weight)
            self.close((loss, weight.grad, y, part), (total, gradient, wanted, wanted[1:]), where)
            self.assertEqual((flat, nothing, three), (x.view(-1), None, 3))
            kept.append((y.detach(), wanted.detach()))
            for number, pair in enumerate(kept):
                self.close(*pair, f"{where}, output of step {number}")
            weight.grad = None
            del y, part, flat, loss
        return injection.times

    @parametrize("is_lasting", [False, True])
    @parametrize("part", range(4))
    def test_each_place(self, part: int, is_lasting: bool) -> None:
        reached, problems = 0, []
        with injected.instrumented() as injection:
            for place in injected.PLACES[part::4]:
                try:
                    times = self.steps(injection, place, is_lasting=is_lasting)
                    if times and "AssertionError: injected" not in (said := self.said()):
                        problems.append(f"{place}: the report says nothing: {said!r}")
                except Exception as error:
                    problems.append(f"{place}: {type(error).__name__}: {str(error)[:300]}")
                    times = injection.times
                reached += times > 0
                injection.arm(0, is_lasting=False)
        self.assertFalse(problems, "\n".join(problems))
        self.assertGreater(reached, len(injected.PLACES) // 8)


@instantiate_parametrized_tests
class TestPrograms(ContainmentTestCase):
    """Programs with which torch's own graphs raise."""

    @parametrize("kind", ["output", "detached", "view", "graph", "hook", "twice"])
    @parametrize("shape", [(4, 16), (33, 16)])
    def test_something_is_held_over_a_backward(self, kind: str, shape: tuple[int, int]) -> None:
        layer = torch.nn.Linear(16, 16).to(self.device)
        f, kept = self.graphed(lambda x: torch.tanh(layer(x))), []
        for step in range(16):
            x = self.some(*shape)
            y = f(x)
            if step < 6 or step % 3:
                y.sum().backward()
            elif kind == "graph":
                loss = y.sum()
                loss.backward(retain_graph=True)
                layer.zero_grad()
                loss.backward()
                del loss
            elif kind == "twice":
                loss = y.sum()
                torch.autograd.grad(loss, layer.weight, retain_graph=True)
                loss.backward()
                del loss
            elif kind == "hook":
                seen: list[torch.Tensor] = []
                with torch.autograd.graph.saved_tensors_hooks(lambda t, seen=seen: (seen.append(t), t)[1], lambda t: t):
                    f(x).sum().backward()
                layer.zero_grad()
                y.sum().backward()
                del seen
            else:
                y.sum().backward()
                held = {"output": y, "detached": y.detach(), "view": y[1:]}[kind].detach()
                kept.append((held, torch.tanh(layer(x)).detach()[1 if kind == "view" else 0 :]))
            del y
            wanted = torch.autograd.grad(torch.tanh(layer(x)).sum(), list(layer.parameters()))
            for parameter, gradient in zip(layer.parameters(), wanted, strict=True):
                self.close(parameter.grad, gradient, f"{kind}, step {step}")
            layer.zero_grad()
            for held, value in kept:
                self.close(held, value, f"{kind}, step {step}")
        *_, backward = (f for f in pygraph_trees.report().functions if f.mode == "backward")
        self.assertLessEqual(backward.ungraphed_calls, 4)
        self.assertGreater(backward.replays, 5)

    @parametrize("gradients", [False, True])
    def test_an_operator_waits_while_it_is_captured(self, gradients: bool) -> None:
        f = self.graphed(lambda x: waiting(x.sin()) * 2)
        g = self.graphed(lambda y: y.cos() + 1)
        for step in range(8):
            x = self.some(4, 8, requires_grad=gradients)
            with torch.set_grad_enabled(False):
                wanted = x.sin() * x.sin().sum().item() * 2
                self.close(g(f(x)), wanted.cos() + 1, f"step {step}")
        self.assertIn(FAILED, self.said())
        self.assertEqual(sum(function.replays > 0 for function in pygraph_trees.report().functions), 1)

    def test_random_numbers_after_an_operator_waited(self) -> None:
        """If torch cannot end a capture, its stream stays current, its pool in use, and its generators capturing."""
        f = self.graphed(lambda x: waiting(x.sin()) * 2)
        for step in range(4):
            x = self.some(4, 8)
            self.close(f(x), x.sin() * x.sin().sum() * 2, f"step {step}")
            self.assertEqual(torch.cuda.current_stream(), torch.cuda.default_stream())
            torch.manual_seed(step)
            own = torch.Generator(self.device).manual_seed(step)
            drawn, wanted = (torch.rand(8, device=self.device, generator=generator) for generator in (None, own))
            self.assertEqual(drawn, wanted)
        self.assertIn(FAILED, self.said())
        self.assertNotIn("already recording", self.said())

    def test_an_error_of_the_program_while_it_is_captured(self) -> None:
        """It passes through, and the next calls are as if it had not been."""
        f = self.graphed(lambda x, s: (x * s).sin() + moody(x))
        scale = torch.tensor(3.0, device=self.device)
        f(self.some(4096), scale)
        MOOD["fail"] = "capture"
        with self.assertRaisesRegex(ValueError, "the operator fails while it is captured"):
            f(self.some(4096), scale)
        MOOD["fail"] = ""
        for step in range(8):
            x = self.some(4096)
            self.close(f(x, scale), (x * scale).sin() + x * 2, f"step {step}")
        (function,) = pygraph_trees.report().functions
        self.assertEqual([r.copied_bytes for r in function.recordings], [0])
        self.assertGreater(function.replays, 2)

    @parametrize("training", [False, True])
    def test_out_of_memory_while_recording(self, training: bool) -> None:
        """The call runs un-graphed if that takes less memory; the function is graphed once there is enough."""
        total, count = torch.cuda.get_device_properties(0).total_memory, 1 << 24
        weight = torch.ones(count, device=self.device, requires_grad=training)
        f = self.graphed(lambda x: ((x * weight).sort()[0] + (x + weight).sort()[0]).square())

        def step(number: int) -> None:
            x = self.some(count)
            y, wanted = f(x), ((x * weight).sort()[0] + (x + weight).sort()[0]).square()
            self.close(y, wanted, f"step {number}")
            if training:
                (wanted_gradient,) = torch.autograd.grad(wanted.sum(), weight)
                (gradient,) = torch.autograd.grad(y.sum(), weight)
                self.close(gradient, wanted_gradient, f"step {number}")

        step(0)
        gc.collect()
        torch.cuda.empty_cache()
        raised, fillers = 0, []  # memory that earlier tests have left, in which the call would otherwise find room
        torch.cuda.set_per_process_memory_fraction(torch.cuda.memory_reserved() / total)
        with contextlib.suppress(torch.OutOfMemoryError):
            while True:
                fillers.append(torch.empty(count, device=self.device))
        for tenths in (5, 10, 20, 40):
            fraction = (torch.cuda.memory_reserved() + tenths * count * 4 / 10) / total
            torch.cuda.set_per_process_memory_fraction(min(1.0, fraction))
            try:
                f(self.some(count))
            except torch.OutOfMemoryError:
                raised += 1
            torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(1.0)
        fillers.clear()
        self.assertGreater(raised, 0)
        for number in range(1, 9):
            step(number)
        forward = next(f for f in pygraph_trees.report().functions if f.mode != "backward")
        self.assertGreater(forward.replays, 3)
        self.assertEqual(forward.recordings[-1].copied_bytes, 0)

    @parametrize("channels", [1, 8])
    def test_a_forward_gives_a_parameter_other_memory(self, channels: int) -> None:
        class Masked(torch.nn.Conv2d):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                with torch.no_grad():
                    self.weight.data *= mask
                return super().forward(x)

        layers = [Masked(channels, 8, 3, padding=1).to(self.device), Masked(8, 8, 3, padding=1).to(self.device)]
        mask = torch.ones(3, 3, device=self.device)
        mask[2] = 0
        model = torch.nn.Sequential(layers[0], torch.nn.ReLU(), layers[1])
        f, optimizer = self.graphed(model), torch.optim.SGD(model.parameters(), 0.05)
        for step in range(10):
            x = self.some(4, channels, 8, 8)
            wanted = torch.autograd.grad(model(x).square().mean(), list(model.parameters()))
            f(x).square().mean().backward()
            for parameter, gradient in zip(model.parameters(), wanted, strict=True):
                self.close(parameter.grad, gradient, f"step {step}")
            optimizer.step()
            optimizer.zero_grad()

    @parametrize("rows", [3, 16])
    def test_a_loop_whose_state_is_returned(self, rows: int) -> None:
        def loop(x: torch.Tensor, count: torch.Tensor) -> Any:
            i = torch.zeros((), dtype=torch.int64, device=x.device)
            return torch.while_loop(lambda i, x: i < count, lambda i, x: (i + 1, x * 1.5), (i, x.clone()))

        f, x = self.graphed(loop), self.some(rows, 8)
        with torch.no_grad():
            for step in range(10):
                count = torch.tensor(2 + step % 3, device=self.device)
                number, found = f(x, count)
                wanted = x * 1.5 ** (2 + step % 3)
                self.assertEqual(int(number), 2 + step % 3)
                self.close(found, wanted, f"step {step}")
                x = wanted / wanted.norm()

    @parametrize("columns", [7, 20])
    def test_an_intermediate_is_resized(self, columns: int) -> None:
        layer = torch.nn.Linear(32, 6).to(self.device)

        def widened(x: torch.Tensor) -> Any:
            hidden = layer(x) * 2
            first = hidden[:, 0].clone()
            hidden.resize_(hidden.shape[0], columns)
            hidden.fill_(0.25)
            hidden[:, -1] = first
            return torch.tanh(hidden), hidden

        f, kept = self.graphed(widened), []
        with torch.no_grad():
            for step in range(10):
                x = self.some(4, 32)
                kept.append((f(x), widened(x)))
                for number, (found, wanted) in enumerate(kept):
                    self.close(found, wanted, f"step {step}, outputs of step {number}")

    def test_a_tensor_that_is_kept_inside(self) -> None:
        """An operator keeps memory of the graph pool while it warms up."""
        f, g = self.graphed(lambda x: moody(x.sin())), self.graphed(lambda x: x.cos() * 2)
        held = []
        with torch.no_grad():
            for step, size in itertools.product(range(6), (4, 9)):
                x = self.some(size, 8)
                MOOD["leak"] = len(LEAKED) < 2
                self.close(f(x), x.sin() * 2, f"step {step}")
                self.close(g(x), x.cos() * 2, f"step {step}")
                held += [x.sin() * 3 for _ in range(len(LEAKED) - len(held))]
                for one, value in zip(LEAKED, held, strict=True):
                    self.close(one, value, f"step {step}")


if __name__ == "__main__":
    run_tests()
