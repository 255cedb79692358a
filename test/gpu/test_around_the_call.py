"""Actions of a program around and inside a call."""

from __future__ import annotations

import contextlib
import gc
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from indirection import Facts, IndirectionTestCase
from parity import marked
from torch.autograd.graph import saved_tensors_hooks
from torch.testing._internal.common_utils import instantiate_parametrized_tests, parametrize, run_tests

from pygraph_trees.trees.functions.dispatch import PER_THREAD

CALLS = 6


def same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """Makes channels-last tensors contiguous, and leaves parameters unchanged."""
    return tensor.contiguous() if tensor.dim() == 4 else tensor


def columns(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.t().contiguous().t() if tensor.dim() == 2 else tensor


def gaps(tensor: torch.Tensor) -> torch.Tensor:
    return torch.stack([tensor, tensor], -1)[..., 0] if tensor.is_floating_point() else tensor


def negative(tensor: torch.Tensor) -> torch.Tensor:
    return torch._neg_view(-tensor) if tensor.is_floating_point() else tensor


HOOKS: dict[str, tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]] = {
    "identity": (same, same),
    "other strides when packed": (plain, same),
    "other strides when unpacked": (same, plain),
    "columns": (same, columns),
    "gaps": (gaps, same),
    "a copy": (torch.Tensor.clone, same),
    "negated": (same, negative),
    "to the CPU and back": (lambda t: t.cpu(), lambda t: t.cuda()),
    "left on the CPU": (lambda t: t.cpu(), same),
    "in double precision": (lambda t: t.double() if t.is_floating_point() else t, same),
}
EAGER_RAISES = {"left on the CPU", "in double precision"}  # for some operators; then eager without hooks is the oracle


def convolution(device: torch.device) -> tuple[Callable[..., Any], list[torch.Tensor]]:
    """A convolution whose activations are channels last."""
    w = torch.randn(4, 4, 3, 3, device=device).to(memory_format=torch.channels_last).requires_grad_()
    x = torch.randn(2, 4, 8, 8, device=device).to(memory_format=torch.channels_last)
    return lambda x, w: F.conv2d(torch.relu(F.conv2d(torch.sin(x), w, padding=1)), w), [x, w]


def products(device: torch.device) -> tuple[Callable[..., Any], list[torch.Tensor]]:
    w = torch.randn(32, 32, device=device, requires_grad=True)
    return lambda x, w: torch.tanh(x.sin() @ w) @ w.t() * x.exp(), [torch.randn(32, 32, device=device), w]


def pointwise(device: torch.device) -> tuple[Callable[..., Any], list[torch.Tensor]]:
    w = torch.randn(64, device=device, requires_grad=True)
    return lambda x, w: (x.sin() * w).exp().cos(), [torch.randn(33, 64, device=device).t().contiguous().t(), w]


PROGRAMS = {"convolution": convolution, "products": products, "pointwise": pointwise}


class TestSavedTensorHooks(IndirectionTestCase):
    def setUp(self) -> None:
        super().setUp()
        self.flags = contextlib.ExitStack()
        self.flags.enter_context(torch.backends.cudnn.flags(enabled=True, deterministic=True, allow_tf32=False))

    def tearDown(self) -> None:
        self.flags.close()  # before torch's own, which compares flags since torch 2.15
        super().tearDown()

    def gradients(self, fn: Callable[..., Any], inputs: list[torch.Tensor], hooks: Any) -> list[Any]:
        x = inputs[0].clone(memory_format=torch.preserve_format).requires_grad_()
        with saved_tensors_hooks(*hooks) if hooks else contextlib.nullcontext():
            out = fn(x, *inputs[1:])
        found = torch.autograd.grad(out.square().sum(), [x, *inputs[1:]])
        return [tensor.clone() for tensor in found]

    def check_calls(self, program: str, order: list[str | None]) -> None:
        """Makes a call with each of these hooks in turn; None stands for a call without hooks."""
        fn, inputs = PROGRAMS[program](self.device)
        graphed = torch.compile(fn, mode="reduce-overhead")
        for call, hooks in enumerate(order):
            given = None if hooks is None else HOOKS[hooks]
            wanted = self.gradients(fn, inputs, None if hooks in EAGER_RAISES else given)
            torch.compiler.cudagraph_mark_step_begin()
            found = self.gradients(graphed, inputs, given)
            self.assertEqual(found, wanted, atol=2e-4, rtol=2e-4, msg=f"call {call}, {hooks}")
        self.assertGreater(Facts.now().replays, 0)

    @parametrize("program", PROGRAMS)
    def test_hooks_after_calls_without(self, program: str) -> None:
        self.check_calls(program, [None] * 4 + [hooks for name in HOOKS for hooks in (name, name, name, None)])

    @parametrize("hooks", HOOKS)
    @parametrize("program", PROGRAMS)
    def test_hooks_from_the_first_call_on(self, program: str, hooks: str) -> None:
        self.check_calls(program, [hooks] * 4 + [None] * 3)

    def test_a_hook_that_transposes_in_place(self) -> None:
        """A saved tensor that comes back at the same address with other strides gives eager's gradients."""
        fn, inputs = products(self.device)
        graphed = torch.compile(fn, mode="reduce-overhead")
        hooks = same, lambda t: t.t() if t.shape == (32, 32) else t
        for call in range(CALLS):
            given = hooks if call >= 3 else None
            wanted = self.gradients(fn, inputs, given)
            torch.compiler.cudagraph_mark_step_begin()
            self.assertEqual(self.gradients(graphed, inputs, given), wanted, atol=2e-3, rtol=2e-3, msg=f"call {call}")


class Garbage:
    """Garbage that only the collector frees; then it calls a function and compares the result."""

    collected = 0
    failures: list[str] = []  # noqa: RUF012

    def __init__(self, graphed: Callable[..., Any], fn: Callable[..., Any], *inputs: torch.Tensor) -> None:
        self.cycle = self
        wanted = fn(*inputs)
        weakref.finalize(self, Garbage.check, graphed, inputs, wanted).atexit = False

    @staticmethod
    def check(graphed: Callable[..., Any], inputs: tuple[torch.Tensor, ...], wanted: torch.Tensor) -> None:
        Garbage.collected += 1
        found = graphed(*inputs).clone()
        if not torch.equal(found, wanted):
            Garbage.failures.append(f"the inner call is off by {(found - wanted).abs().max()}")


class TestFinalizers(IndirectionTestCase):
    def setUp(self) -> None:
        super().setUp()
        Garbage.collected, Garbage.failures = 0, []
        before = gc.get_threshold()
        self.addCleanup(lambda: gc.set_threshold(*before))

    @parametrize("is_another", [False, True])
    @parametrize("threshold", [1, 20])
    @parametrize("count", [1, 12])
    def test_the_collector_runs_inside_of_calls(self, count: int, threshold: int, is_another: bool) -> None:
        def fn(*xs: torch.Tensor) -> torch.Tensor:
            return sum(x * (n + 1) for n, x in enumerate(xs)) + 1

        def other(*xs: torch.Tensor) -> torch.Tensor:
            return torch.stack(xs).amax(0) * 3

        graphed = torch.compile(fn, mode="reduce-overhead")
        inner = (torch.compile(other, mode="reduce-overhead"), other) if is_another else (graphed, fn)

        def some() -> list[torch.Tensor]:
            return [torch.randint(9, (257,), device=self.device).float() for _ in range(count)]

        for _ in range(4):
            for function in marked((graphed, inner[0])):
                function(*some())
        gc.collect()
        for call in range(200):
            Garbage(*inner, *some())
            inputs = some()
            wanted = fn(*inputs)
            torch.compiler.cudagraph_mark_step_begin()
            gc.set_threshold(threshold)
            try:
                found = graphed(*inputs)
            finally:
                gc.set_threshold(700)
            self.assertEqual(found, wanted, atol=0, rtol=0, msg=f"call {call}, {Garbage.collected} collected")
            del found
        self.assertEqual(Garbage.failures, [])
        self.assertGreater(Garbage.collected, 30)

    def test_an_input_whose_last_reference_a_call_holds(self) -> None:
        """An input whose last reference is the call's may call the same function in its finalizer."""
        graphed = torch.compile(lambda x: x * 2 + 1, mode="reduce-overhead")
        seen: list[Any] = []

        def call_again(value: float) -> None:
            y = torch.full((64,), value, device=self.device)
            seen.append((graphed(y).clone(), y * 2 + 1))

        for number in marked(range(12)):
            holder = [torch.full((64,), float(number), device=self.device)]
            wanted = holder[0] * 2 + 1
            weakref.finalize(holder[0], call_again, 100.0 + number).atexit = False
            found = graphed(holder.pop())
            self.assertEqual(found, wanted)
        gc.collect()
        self.assertEqual(len(seen), 12)
        for found, wanted in seen:
            self.assertEqual(found, wanted)

    def test_finalizers_while_functions_are_recorded(self) -> None:
        """Each call records for other sizes, with a garbage collection at every allocation."""
        graphed = torch.compile(lambda x: x.cumsum(0) * 2, mode="reduce-overhead", dynamic=False)
        torch._dynamo.config.cache_size_limit, before = 64, torch._dynamo.config.cache_size_limit
        self.addCleanup(lambda: setattr(torch._dynamo.config, "cache_size_limit", before))
        small = torch.ones(16, device=self.device)
        for _ in range(3):
            graphed(small)
        for size in range(17, 25):
            for _ in range(3):
                Garbage(graphed, lambda x: x.cumsum(0) * 2, small * size)
                x = torch.full((size,), 2.0, device=self.device)
                torch.compiler.cudagraph_mark_step_begin()
                gc.set_threshold(5)
                try:
                    found = graphed(x)
                finally:
                    gc.set_threshold(700)
                self.assertEqual(found, x.cumsum(0) * 2)
        gc.collect()
        self.assertEqual(Garbage.failures, [])
        self.assertGreater(Garbage.collected, 10)

    def test_finalizers_while_a_thread_makes_its_first_recording(self) -> None:
        """The collector runs at every allocation while the manager of a new thread is made."""
        graphed = torch.compile(lambda x: x.cumsum(0) * 2, mode="reduce-overhead")
        x = torch.full((16,), 2.0, device=self.device)
        for _ in range(3):
            graphed(x)
        found: list[torch.Tensor] = []

        def call() -> None:
            for _ in range(3):
                Garbage(graphed, lambda x: x.cumsum(0) * 2, x)
                torch.compiler.cudagraph_mark_step_begin()
                gc.set_threshold(1)
                try:
                    found.append(graphed(x).clone())
                finally:
                    gc.set_threshold(700)

        thread = threading.Thread(target=call, daemon=True)
        thread.start()
        thread.join(120)
        self.assertFalse(thread.is_alive(), "it waits for a lock of its own")
        gc.collect()
        self.assertEqual(found, [x.cumsum(0) * 2] * 3)
        self.assertEqual(Garbage.failures, [])
        self.assertEqual(Garbage.collected, 3)


class TestHooksThatCall(IndirectionTestCase):
    def test_hooks_of_tensors_and_of_saved_tensors(self) -> None:
        def fn(x: torch.Tensor) -> torch.Tensor:
            return (x * 3).tanh().exp()

        graphed = torch.compile(fn, mode="reduce-overhead")
        inner: list[Any] = []

        def call(tensor: torch.Tensor) -> torch.Tensor:
            y = torch.full((32,), float(len(inner) % 5) / 5, device=self.device)
            with torch.no_grad():
                inner.append((graphed(y).clone(), fn(y)))
            return tensor

        for number in range(8):
            results = []
            for way in marked((fn, graphed)):
                x = torch.linspace(-1, 1, 32, device=self.device).mul_(number / 8).requires_grad_()
                with saved_tensors_hooks(call, call) if way is graphed else contextlib.nullcontext():
                    out = way(x)
                if way is graphed:
                    out.register_hook(call)
                out.sum().backward()
                results.append(x.grad.clone())
            self.assertEqual(results[1], results[0], msg=f"call {number}")
        self.assertGreater(len(inner), 16)
        for found, wanted in inner:
            self.assertEqual(found, wanted)

    def test_an_operator_of_the_program_that_calls(self) -> None:
        """An operator may call a compiled function, also while the outer function is warmed up and recorded."""
        inner = torch.compile(lambda x: x * 2 + 1, mode="reduce-overhead")

        @torch.library.custom_op("pygraph_test_around::calls", mutates_args=())
        def calls(x: torch.Tensor) -> torch.Tensor:
            return inner(x).clone()

        calls.register_fake(lambda x: torch.empty_like(x))
        outer = torch.compile(lambda x: calls(x.sin()) + x, mode="reduce-overhead")
        for number in range(8):
            x = torch.linspace(0, 1, 64, device=self.device) * number
            torch.compiler.cudagraph_mark_step_begin()
            self.assertEqual(inner(x), x * 2 + 1)
            torch.compiler.cudagraph_mark_step_begin()
            self.assertEqual(outer(x), x.sin() * 2 + 1 + x)


class TestThreads(IndirectionTestCase):
    @parametrize("count", [1, 9])
    def test_threads_that_call_one_function(self, count: int) -> None:
        """Each thread has its own inputs; the function mutates one, which shows whose addresses a launch used."""

        def fn(out: torch.Tensor, *xs: torch.Tensor) -> None:
            out.copy_(sum(x * (n + 1) for n, x in enumerate(xs)))

        graphed = torch.compile(fn, mode="reduce-overhead")
        for _ in marked(range(4)):
            graphed(*(torch.ones(64, 64, device=self.device) for _ in range(count + 1)))
        failures: list[str] = []

        def work(number: int) -> None:
            try:
                for call in range(200):
                    out = torch.zeros(64, 64, device=self.device)
                    xs = [torch.full((64, 64), number + call / 256 + n, device=self.device) for n in range(count)]
                    wanted = torch.zeros(64, 64, device=self.device)
                    fn(wanted, *xs)
                    graphed(out, *xs)
                    if not torch.equal(out, wanted):
                        failures.append(f"thread {number}, call {call}")
            except Exception as error:
                failures.append(f"thread {number}: {error!r}")

        before = sys.getswitchinterval()
        sys.setswitchinterval(1e-5)
        try:
            threads = [threading.Thread(target=lambda n=n: work(n)) for n in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(120)
        finally:
            sys.setswitchinterval(before)
        self.assertFalse([thread for thread in threads if thread.is_alive()])
        self.assertEqual(failures, [])
        self.assertGreater(Facts.now().replays, 50 if PER_THREAD else 0)  # otherwise by this thread alone

    def test_a_backward_in_a_thread_beside_calls_in_this_one(self) -> None:
        w = torch.randn(64, 64, device=self.device, requires_grad=True)

        def fn(x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(x @ w)

        graphed = torch.compile(fn, mode="reduce-overhead")
        x = torch.randn(64, 64, device=self.device)
        (wanted_gradient,) = torch.autograd.grad(fn(x).sum(), w)
        with torch.no_grad():
            wanted = fn(x)
        for _ in marked(range(60)):
            out, found = graphed(x), []
            thread = threading.Thread(
                target=lambda out=out, found=found: found.append(torch.autograd.grad(out.sum(), w)[0].clone())
            )
            thread.start()
            with torch.no_grad():
                inference = graphed(x).clone()
            thread.join(60)
            self.assertFalse(thread.is_alive())
            self.assertEqual(inference, wanted, atol=1e-4, rtol=1e-4)
            self.assertEqual(found[0], wanted_gradient, atol=1e-3, rtol=1e-3)


for _case in (TestSavedTensorHooks, TestFinalizers, TestThreads):
    instantiate_parametrized_tests(_case)

if __name__ == "__main__":
    run_tests()
