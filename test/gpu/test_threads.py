"""Threads that call the same functions, each on a stream of its own; eager is the oracle."""

from __future__ import annotations

import contextvars
import gc
import math
import queue
import threading
import time
import unittest
import weakref
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import user_operators
from indirection import KeptTestCase
from new_program import printed
from torch._inductor import cudagraph_trees
from torch.testing._internal.common_utils import instantiate_parametrized_tests, parametrize, run_tests

import pygraph_trees
from pygraph_trees.native import binding
from pygraph_trees.trees.functions.dispatch import PER_THREAD

THREADS = 8
FIRST, CALLS = 12, 20  # calls of a thread before those that are counted, and these
SIZES = [(64, 64), (256, 128)]

IN_A_THREAD = """
import gc, threading, torch, pygraph_trees
x, made, spent = torch.ones(8, device="cuda"), [], []

def work():
    if not made:
        made.append(torch.compile(lambda x: x.sin() * 2, mode="reduce-overhead"))
    for _ in range(5):
        torch.testing.assert_close(made[0](x), x.sin() * 2)

def in_a_thread():
    (thread := threading.Thread(target=work)).start()
    thread.join()
    gc.collect()
    spent.extend({i: i} for i in range(1000))  # where containers would be that are gone

in_a_thread()
in_a_thread()
work()
print(sum(function.replays for function in pygraph_trees.report().functions))
"""

Work = Callable[[int, int], None]  # is given the number of the thread and that of the call


def slow_calls() -> Counter[str]:
    found: Counter[str] = Counter()
    for function in pygraph_trees.report().functions:
        found.update(function.slow_calls)
    return found


@instantiate_parametrized_tests
class TestThreads(KeptTestCase):
    def setUp(self) -> None:
        super().setUp()
        assert user_operators.cloned is not None
        torch.manual_seed(0)
        self.values = torch.randn(1 << 18, device=self.device)

    def graphed(self, fn: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        compiled: Callable[..., Any] = torch.compile(fn, mode="reduce-overhead", **options)
        return compiled

    def some(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=self.device)

    def input(self, number: int, call: int, *shape: int) -> torch.Tensor:
        """New values for each call. Until torch 2.13, no numbers may be drawn while another thread captures."""
        return (self.values[: math.prod(shape)].view(shape) + (31 * number + call) * 0.1).sin()

    def close(self, found: Any, wanted: Any, where: str) -> None:
        self.assertEqual(found, wanted, atol=1e-3, rtol=1e-3, msg=lambda text: f"{where}: {text}")

    def test_the_first_thread_to_compile_ends(self) -> None:
        """It imports torch's trees. When it ends, torch 2.11 releases references that it never took."""
        self.assertGreater(printed(IN_A_THREAD), 0)

    def in_threads(self, work: Work, *, at_once: bool = True, count: int = THREADS) -> tuple[int, int]:
        """Calls ``work`` in threads with a stream each, and returns how many of the last calls asked for the fast path
        and how many took it. Only if ``at_once``, threads may be in their first calls at the same time.
        """
        turn, errors = threading.Lock(), []
        everyone = threading.Barrier(count + 1)
        torch.cuda.synchronize()  # inputs were made on another stream

        def run(number: int) -> None:
            try:
                with torch.cuda.stream(torch.cuda.Stream(self.device)):
                    if at_once:
                        for call in range(FIRST):
                            work(number, call)
                    else:
                        with turn:
                            for call in range(FIRST):
                                work(number, call)
                    everyone.wait(300)
                    everyone.wait(300)  # meanwhile, the main thread reads the counts
                    for call in range(FIRST, FIRST + CALLS):
                        work(number, call)
                    everyone.wait(300)
                    torch.cuda.current_stream().synchronize()
            except BaseException as error:
                errors.append(error)
                everyone.abort()

        # Since torch 2.12, what a test patches in the configuration belongs to the context.
        contexts = [contextvars.copy_context() for _ in range(count)]
        threads = [threading.Thread(target=contexts[n].run, args=(run, n)) for n in range(count)]
        for thread in threads:
            thread.start()
        counts, slow = [], []
        try:
            for waits in (1, 2):
                for _ in range(waits):
                    everyone.wait(300)
                counts.append(binding.extension.counts()[:2])
                slow.append(slow_calls())
        except threading.BrokenBarrierError:
            pass
        for thread in threads:
            thread.join(300)
        errors.sort(key=lambda error: isinstance(error, threading.BrokenBarrierError))
        if errors:
            raise errors[0]
        asked, fast = (after - before for before, after in zip(*counts, strict=True))
        if PER_THREAD:
            self.assertEqual(slow[1] - slow[0], Counter())
        return asked, fast

    def assertAllFast(self, counts: tuple[int, int], calls: int) -> None:
        """Each call of each thread took the fast path, if each has its own recordings."""
        if PER_THREAD:
            self.assertEqual(counts, (calls, calls))

    @parametrize("size", SIZES)
    @parametrize("at_once", [True, False])
    def test_serving(self, size: tuple[int, int], at_once: bool) -> None:
        weights = [self.some(size[1], size[1]) / size[1] ** 0.5 for _ in range(3)]

        def model(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            for weight in weights:
                x = torch.tanh(x @ weight) + x.mean(0, keepdim=True)
            return x, x.sum(0)

        graphed = self.graphed(model, dynamic=False)

        def work(number: int, call: int) -> None:
            with torch.no_grad():
                x = self.input(number, call, *size)
                found = graphed(x)
                self.close(found, model(x), f"thread {number}, call {call}")

        for call in range(4):
            work(-1, call)
        self.assertAllFast(self.in_threads(work, at_once=at_once), THREADS * CALLS)

    @parametrize("size", SIZES)
    @parametrize("at_once", [True, False])
    def test_forward_and_backward(self, size: tuple[int, int], at_once: bool) -> None:
        """Autograd runs the backwards of all threads in one thread of its own."""

        def loss(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            hidden = torch.tanh(x @ weight)
            return (hidden * hidden.mean(0) + x).square().mean()

        graphed = self.graphed(loss, dynamic=False)
        weights = [self.some(size[1], size[1]) / size[1] ** 0.5 for _ in range(THREADS + 1)]

        def work(number: int, call: int) -> None:
            x, weight = self.input(number, call, *size).requires_grad_(), weights[number].detach().requires_grad_()
            found = []
            for fn in (graphed, loss):
                value = fn(x, weight)
                found.append((value.detach().clone(), *torch.autograd.grad(value, (x, weight))))
            self.close(*found, f"thread {number}, call {call}")

        for call in range(4):
            work(-1, call)
        self.assertAllFast(self.in_threads(work, at_once=at_once), 2 * THREADS * CALLS)

    def test_gradients_are_accumulated_while_other_threads_train(self) -> None:
        """Each thread trains its own model; all have the same code."""
        models = [
            torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 8)) for _ in range(3)
        ]
        models = [model.to(self.device) for model in models]

        def loss(x: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
            weight, bias, last, end = parameters
            hidden = torch.nn.functional.gelu(torch.nn.functional.linear(x, weight, bias))
            return torch.nn.functional.linear(hidden, last, end).square().mean()

        graphed = self.graphed(loss, dynamic=False)

        def work(number: int, call: int) -> None:
            parameters, inputs = (
                list(models[number].parameters()),
                [self.input(number, 3 * call + n, 32, 64) for n in range(3)],
            )
            wanted = [torch.zeros_like(parameter) for parameter in parameters]
            for x in inputs:
                graphed(x, *parameters).backward()
                for total, gradient in zip(wanted, torch.autograd.grad(loss(x, *parameters), parameters), strict=True):
                    total += gradient
            self.close([parameter.grad for parameter in parameters], wanted, f"thread {number}, call {call}")
            models[number].zero_grad(set_to_none=True)

        work(0, 0)
        self.in_threads(work, count=len(models))

    def test_sizes(self) -> None:
        """Each thread has recordings of its own for each size."""

        def model(x: torch.Tensor) -> torch.Tensor:
            return (x.sin() * 2 + x.mean(0)).cumsum(0)

        graphed, sizes = self.graphed(model, dynamic=True), (24, 48, 96)

        def work(number: int, call: int) -> None:
            with torch.no_grad():
                for size in sizes if number % 2 else sizes[:2]:
                    x = self.input(number, call, size, 32)
                    self.close(graphed(x), model(x), f"thread {number}, call {call}, size {size}")

        for call in range(4):
            work(1, call)
        asked, fast = self.in_threads(work)
        self.assertAllFast((asked, fast), CALLS * THREADS // 2 * (2 + 3))

    @parametrize("name", ["generated", "library"])
    @parametrize("is_view", [True, False])
    def test_a_reader_gets_the_value_that_it_was_given(self, name: str, is_view: bool) -> None:
        """Though the thread that made it has begun other steps."""

        def model(x: torch.Tensor) -> torch.Tensor:
            return x.sin() * 2 if name == "generated" else torch.ops.pygraph_indirection_test.cloned(x.sin())

        graphed = self.graphed(model, dynamic=False)
        given: queue.Queue[Any] = queue.Queue(4)
        errors: list[BaseException] = []

        def read() -> None:
            try:
                with torch.cuda.stream(torch.cuda.Stream(self.device)):
                    while (item := given.get(timeout=120)) is not None:
                        output, wanted, ready = item
                        torch.cuda.current_stream().wait_event(ready)
                        found = [output + 0 for _ in range(3)]
                        torch.cuda.current_stream().synchronize()  # before its memory is used again
                        del output, item
                        for value in found:
                            self.assertEqual(value, wanted)
            except BaseException as error:
                errors.append(error)

        readers = [threading.Thread(target=read) for _ in range(2)]
        for reader in readers:
            reader.start()
        with torch.no_grad():
            for call in range(FIRST + CALLS):
                x = self.input(0, call, 1 << 18)
                wanted, output = model(x), graphed(x)
                if is_view:
                    wanted, output = wanted[7:], output[7:]
                ready = torch.cuda.Event()
                ready.record()
                if call < FIRST:  # an output that is moved: no operation may have read its address
                    graphed(self.values)  # begins a step
                given.put((output, wanted, ready), timeout=120)
                del output
                graphed(self.values)
        for _ in readers:
            given.put(None, timeout=120)
        for reader in readers:
            reader.join(120)
        self.assertEqual(errors, [])

    @parametrize("library", [False, True])
    @parametrize("is_held", [False, True])
    def test_the_main_thread_warms_up_and_another_one_serves(self, library: bool, is_held: bool) -> None:
        """Which replays at the latest when the main thread has made no calls for a second; it keeps what it holds."""

        def model(x: torch.Tensor) -> torch.Tensor:
            return torch.ops.pygraph_indirection_test.cloned(x.sin() * 2) if library else (x.sin() * 2).cumsum(0)

        graphed, replays, errors = self.graphed(model, dynamic=False), [], []

        def serve() -> None:
            try:
                with torch.no_grad():
                    for call in range(60):
                        x = self.input(1, call, 256, 16)
                        self.close(graphed(x), model(x), f"call {call}")
                        replays.append(pygraph_trees.report().replays)
                        time.sleep(0.03)
            except BaseException as error:
                errors.append(error)

        with torch.no_grad():
            for call in range(6):
                x = self.input(0, call, 256, 16)
                output = graphed(x)
        wanted = model(x)
        if not is_held:
            del output
        thread = threading.Thread(target=contextvars.copy_context().run, args=(serve,))
        thread.start()
        thread.join(300)
        if errors:
            raise errors[0]
        self.assertGreaterEqual(replays[-1] - replays[-11], 10)
        if is_held:
            self.assertEqual(output, wanted)
        with torch.no_grad():
            self.close(graphed(x), wanted, "the main thread again")

    def test_a_thread_trains_after_its_reset_has_freed_the_functions_of_the_main_thread(self) -> None:
        """No manager is left. The backward has no kernels, so it is not graphed, and the first forwards may not be."""
        self.graphed(lambda x: x.sin() * 2)(self.values)
        self.assertIsNotNone(cudagraph_trees.get_manager(0, create_if_none_exists=False))
        both, replays = self.graphed(lambda x, y: torch.cat([x, y]), dynamic=False), []

        def train() -> None:
            for call in range(60):
                leaves = [self.input(number, call, 64, 2).requires_grad_() for number in (1, 2)]
                tangent = self.input(3, call, 128, 2)
                self.close(torch.autograd.grad(both(*leaves), leaves, tangent), tangent.split(64), f"call {call}")
                replays.append(pygraph_trees.report().replays)
                time.sleep(0.03)

        with ThreadPoolExecutor(1) as other:
            other.submit(torch._dynamo.reset).result(300)
            gc.collect()
            self.assertIsNone(cudagraph_trees.get_manager(0, create_if_none_exists=False))
            other.submit(contextvars.copy_context().run, train).result(300)
        self.assertGreaterEqual(replays[-1] - replays[-11], 10)

    @unittest.skipUnless(PER_THREAD, "one thread uses graphs")
    def test_a_thread_that_ends_leaves_nothing(self) -> None:
        """Neither its recordings nor its memory; the functions live on."""

        def loss(x: torch.Tensor) -> torch.Tensor:
            return (torch.tanh(x @ x.mT) * 3).square().mean()

        graphed, managers = self.graphed(loss, dynamic=False), []

        def work(number: int, call: int) -> None:
            x = self.input(number, call, 64, 64).requires_grad_()
            gradients = [torch.autograd.grad(fn(x), x) for fn in (graphed, loss)]
            self.close(*gradients, f"thread {number}, call {call}")
            if call == FIRST + CALLS - 1:
                managers.append(weakref.ref(cudagraph_trees.get_manager(0)))

        for call in range(4):
            work(-1, call)
        for _ in range(3):
            self.in_threads(work)
            gc.collect()
            self.assertEqual([manager() for manager in managers], [None] * len(managers))
        self.assertGreaterEqual(len(managers), 3 * THREADS)
        for call in range(4):
            work(-1, call)


if __name__ == "__main__":
    run_tests()
