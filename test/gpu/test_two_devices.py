"""Two GPUs in one process: a GPU that is not the current one, a model on both, and a thread for each."""

from __future__ import annotations

import threading
from typing import Any

import torch
import torch._dynamo
from indirection import IndirectionTestCase
from parity import requires_two_gpus
from test_trees_concurrency import with_own_manager
from torch.testing._internal.common_utils import instantiate_parametrized_tests, parametrize, run_tests

import pygraph_trees


@requires_two_gpus
class TestTwoDevices(IndirectionTestCase):
    other = torch.device("cuda", 1)

    def graphed(self, fn: Any) -> Any:
        return torch.compile(fn, mode="reduce-overhead")

    def assertReplayed(self, least: int) -> None:
        report = pygraph_trees.report()
        self.assertGreaterEqual(report.replays, least)
        self.assertEqual([f.ungraphed_calls for f in report.functions], [0] * len(report.functions))
        self.assertEqual(sum(r.copied_bytes for f in report.functions for r in f.recordings), 0)

    @parametrize("current", [0, 1])
    def test_tensors_on_the_device_that_is_not_current(self, current: int) -> None:
        graphed, device = self.graphed(lambda x, y: (x @ y).softmax(1)), torch.device("cuda", 1 - current)
        with torch.cuda.device(current), torch.no_grad():
            for call in range(8):
                x, y = torch.randn(32, 32, device=device), torch.randn(32, 32, device=device)
                self.assertEqual(graphed(x, y), (x @ y).softmax(1), msg=f"call {call}")
                self.assertEqual(torch.cuda.current_device(), current)
        self.assertReplayed(6)

    def test_the_current_device_changes_between_calls(self) -> None:
        graphed = self.graphed(lambda x: x.sin() + 1)
        with torch.no_grad():
            for call in range(10):
                with torch.cuda.device(call % 2):
                    x = torch.randn(64, device=self.other)
                    self.assertEqual(graphed(x), x.sin() + 1, msg=f"call {call}")

    def test_a_model_on_both_devices(self) -> None:
        first, second = torch.nn.Linear(32, 32, device=self.device), torch.nn.Linear(32, 32, device=self.other)
        halves = [self.graphed(half) for half in (first, second)]
        for step in range(8):
            x = torch.randn(16, 32, device=self.device)
            gradients = []
            for one, other in (halves, (first, second)):
                first.zero_grad()
                second.zero_grad()
                loss = other(one(x).relu().to(self.other)).square().mean()
                loss.backward()
                gradients.append(
                    [loss.detach(), *(p.grad.clone() for p in (*first.parameters(), *second.parameters()))]
                )
            for found, wanted in zip(*gradients, strict=True):
                self.assertEqual(found, wanted, atol=1e-5, rtol=1e-5, msg=f"step {step}")
        self.assertGreater(pygraph_trees.report().replays, 8)

    def test_a_thread_for_each_device(self) -> None:
        failures: list[BaseException] = []
        one_compiles, both = threading.Lock(), threading.Barrier(2, timeout=120)

        def work(device: torch.device) -> None:
            torch.cuda.set_device(device)
            graphed, x = self.graphed(lambda x: (x * 2).cos() @ x), torch.randn(32, 32, device=device)
            with torch.no_grad():
                with one_compiles:  # torch does not compile in several threads at once
                    graphed(x)
                both.wait()
                for _ in range(20):
                    x = torch.randn(32, 32, device=device)
                    found, wanted = graphed(x), (x * 2).cos() @ x
                    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)

        def noting_failures(device: torch.device) -> None:
            try:
                with_own_manager(lambda: work(device))()
            except BaseException as error:
                failures.append(error)
                both.abort()

        threads = [threading.Thread(target=noting_failures, args=(device,)) for device in (self.device, self.other)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(180)
        if failures:
            raise failures[0]
        self.assertGreater(pygraph_trees.report().replays, 20)  # since the reset, the main thread has used no graphs


instantiate_parametrized_tests(TestTwoDevices)

if __name__ == "__main__":
    run_tests()
