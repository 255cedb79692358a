"""Programs with several streams that wait for each other only if eager code must; eager is the oracle."""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
import user_operators
from indirection import KeptTestCase
from parity import run_threads
from torch.testing._internal.common_utils import instantiate_parametrized_tests, parametrize, run_tests

SLEEP = 40_000_000  # cycles: some 0.02 s
CALLS = 10


def library(x: torch.Tensor) -> torch.Tensor:
    """A library allocates the output."""
    return torch.ops.pygraph_indirection_test.cloned(x.sin())


def generated(x: torch.Tensor) -> torch.Tensor:
    return x.sin() * 2


FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {"library": library, "generated": generated}


@instantiate_parametrized_tests
class TestStreams(KeptTestCase):
    def setUp(self) -> None:
        super().setUp()
        assert user_operators.cloned is not None
        torch.manual_seed(0)
        self.enterContext(torch.no_grad())
        self.first, self.second = self.stream(), self.stream()
        self.weights = [self.some(256, 256) / 16 for _ in range(3)]

    def stream(self) -> Any:
        return torch.cuda.Stream()

    def graphed(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        compiled: Callable[..., Any] = torch.compile(fn, mode="reduce-overhead", dynamic=False)
        return compiled

    def chain(self, x: torch.Tensor) -> torch.Tensor:
        """Has many intermediates, which are in the graph pool, and values of about 1."""
        for number in range(9):
            x = torch.relu(x @ self.weights[number % 3]) * 1.4 + x.mean(0, keepdim=True) * 0.1
        return x

    def some(self, *shape: int) -> torch.Tensor:
        return torch.randn(*(shape or (1 << 20,)), device=self.device)

    @contextlib.contextmanager
    def on(self, stream: Any, *, sleeps: bool = False) -> Iterator[None]:
        with torch.cuda.stream(stream):
            if sleeps:
                torch.cuda._sleep(SLEEP)
            yield

    def doubled(self, x: torch.Tensor) -> torch.Tensor:
        return self.chain(x * 2)

    def close(self, found: torch.Tensor, wanted: torch.Tensor, call: int) -> None:
        self.assertEqual(found, wanted, atol=1e-2, rtol=1e-2, msg=lambda text: f"call {call}: {text}")

    def overwrite(self, size: torch.Size) -> list[torch.Tensor]:
        return [torch.full(size, float("nan"), device=self.device) for _ in range(4)]

    @parametrize("name", ["two functions", "two sizes"])
    def test_replays_on_two_streams_share_the_pool(self, name: str) -> None:
        is_one, f = name == "two sizes", self.graphed(self.chain)
        g, wanted_g = (f, self.chain) if is_one else (self.graphed(self.doubled), self.doubled)
        for call in range(CALLS + 4):
            a, b = self.some(1024, 256), self.some(512 if is_one else 1024, 256)
            wanted = self.chain(a), wanted_g(b)
            torch.cuda.synchronize()
            if call < 4:
                f(a), g(b)
                torch.cuda.synchronize()
                continue
            with self.on(self.first, sleeps=True):
                found = [f(a) for _ in range(3)]
            with self.on(self.second):
                others = [g(b) for _ in range(3)]
            torch.cuda.synchronize()
            for output in found:
                self.close(output, wanted[0], call)
            for output in others:
                self.close(output, wanted[1], call)

    @parametrize("name", list(FUNCTIONS))
    def test_an_output_is_read_where_it_was_made_while_another_stream_begins_a_step(self, name: str) -> None:
        fn, graphed = FUNCTIONS[name], self.graphed(FUNCTIONS[name])
        for call in range(CALLS):
            a, b = self.some(), self.some()
            wanted = fn(a)
            torch.cuda.synchronize()
            with self.on(self.first, sleeps=True):
                output = graphed(a)
            with self.on(self.second):
                graphed(b)
            with self.on(self.first):
                read = output + 0
            torch.cuda.synchronize()
            self.assertEqual(read, wanted, msg=f"call {call}")
            del output, read

    @parametrize("name", list(FUNCTIONS))
    def test_memory_of_an_output_belongs_to_the_stream_that_made_it(self, name: str) -> None:
        """It is freed while its stream still reads it, after another stream began a step."""
        fn, graphed, main = FUNCTIONS[name], self.graphed(FUNCTIONS[name]), torch.cuda.current_stream()
        for call in range(CALLS):
            a, b = self.some(), self.some()
            wanted, output = fn(a), graphed(a)
            self.second.wait_stream(main)
            with self.on(self.second):
                graphed(b)
            main.wait_stream(self.second)
            torch.cuda._sleep(SLEEP)
            read = output.clone()
            del output
            with self.on(self.second):
                spoilt = self.overwrite(read.shape)
            main.wait_stream(self.second)
            torch.cuda.synchronize()
            self.assertEqual(read, wanted, msg=f"call {call}")
            del read, spoilt

    @parametrize("name", list(FUNCTIONS))
    @parametrize("what", ["output", "view"])
    def test_record_stream(self, name: str, what: str) -> None:
        fn, graphed, main = FUNCTIONS[name], self.graphed(FUNCTIONS[name]), torch.cuda.current_stream()
        for call in range(CALLS):
            a, b = self.some(), self.some()
            wanted, output = fn(a), graphed(a)
            self.second.wait_stream(main)
            with self.on(self.second, sleeps=True):
                read = output.clone()
            (output if what == "output" else output[7:]).record_stream(self.second)
            del output
            again = graphed(b)
            main.wait_stream(self.second)
            self.assertEqual(read, wanted, msg=f"call {call}")
            self.assertEqual(again, fn(b), msg=f"call {call}")
            del read, again

    @parametrize("name", list(FUNCTIONS))
    @parametrize("moves", [False, True])
    def test_record_stream_covers_later_uses(self, name: str, moves: bool) -> None:
        """As in torch, it is called once, before other calls, and the last use comes after these."""
        fn, graphed, main = FUNCTIONS[name], self.graphed(FUNCTIONS[name]), torch.cuda.current_stream()
        then = self.graphed(lambda x: x.flip(0) + 1)
        for call in range(CALLS):
            a, b = self.some(), self.some()
            wanted, output = fn(a), graphed(a)
            output.record_stream(self.second)
            after = then(output)
            if moves:
                torch.compiler.cudagraph_mark_step_begin()
                after = then(output)
            self.second.wait_stream(main)
            with self.on(self.second, sleeps=True):
                read = output.clone()
            del output
            again, spoilt = graphed(b), self.overwrite(wanted.shape)
            main.wait_stream(self.second)
            self.assertEqual(read, wanted, msg=f"call {call}")
            self.assertEqual(again, fn(b), msg=f"call {call}")
            self.assertEqual(after, wanted.flip(0) + 1, msg=f"call {call}")
            del read, again, after, spoilt

    def test_gradients_that_another_stream_changes_when_a_step_begins(self) -> None:
        model = torch.nn.Linear(512, 512).to(self.device)
        graphed = self.graphed(model)
        for step in range(CALLS):
            with torch.enable_grad():
                model.zero_grad(set_to_none=True)
                x = self.some(64, 512)
                graphed(x).sum().backward()
            wanted = 2 * x.sum(0, keepdim=True).expand_as(model.weight)
            self.second.wait_stream(torch.cuda.current_stream())
            with self.on(self.second, sleeps=True):
                model.weight.grad.mul_(2)
            with torch.enable_grad():
                graphed(self.some(64, 512))  # begins a step
            torch.cuda.current_stream().wait_stream(self.second)
            self.close(model.weight.grad, wanted, step)

    def test_threads_with_a_stream_each(self) -> None:
        graphed, errors, values = self.graphed(self.chain), [], self.some(256, 256)
        for _ in range(3):
            graphed(self.some(256, 256))
        torch.cuda.synchronize()

        def work(stream: Any) -> None:
            try:
                with torch.no_grad(), torch.cuda.stream(stream):
                    for call in range(CALLS):
                        x = (values + call).sin()  # torch draws no numbers while another thread captures
                        self.close(graphed(x), self.chain(x), call)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=work, args=(self.stream(),)) for _ in range(4)]
        run_threads(threads, errors, 120)


class TestExternalStreams(TestStreams):
    """Another library made the streams, so torch knows only their handles."""

    def stream(self) -> Any:
        handle = ctypes.c_void_p()
        torch.cuda.check_error(int(torch.cuda.cudart().cudaStreamCreate(ctypes.addressof(handle))))
        return torch.cuda.ExternalStream(handle.value)


if __name__ == "__main__":
    run_tests()
