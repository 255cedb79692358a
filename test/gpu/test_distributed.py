"""Several GPUs: ranks over NCCL, with eager's values and soon no more recordings, and two GPUs in one process."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

RANKS = Path(__file__).with_name("ranks.py")

import torch
import torch._dynamo
from indirection import IndirectionTestCase
from packages import is_nccl_a_stub
from parity import requires_cuda, requires_two_gpus, run_threads
from test_trees_concurrency import with_own_manager
from torch.testing._internal.common_utils import TestCase, instantiate_parametrized_tests, parametrize, run_tests

import pygraph_trees

COPIED = {  # bytes, by program
    "data_parallel": 0,
    "fully_sharded": 0,  # its gathered parameters move
    "tensor_parallel": 0,
    "collective_inside": 0,
    "collective_of_an_input": 2 * 512 * 4,
    "collective_between": 0,
}
LONGEST_S = 240
SETTLES = 3  # steps that may record


def run(name: str, world: int) -> subprocess.CompletedProcess[str]:
    """Runs a program on ranks of one host; one that takes too long is ended, and all its ranks with it."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world)]
    command = [*launcher, str(RANKS), name]
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(command, stdout=output, stderr=errors, text=True)
        try:
            process.wait(LONGEST_S)
        except subprocess.TimeoutExpired:
            process.terminate()  # the launcher ends its ranks, which have sessions of their own
            process.wait(LONGEST_S)
        for file in (output, errors):
            file.seek(0)
        return subprocess.CompletedProcess(command, process.returncode, output.read(), errors.read())


def run_alone(name: str, world: int, *options: str) -> tuple[list[int], float]:
    """The exit statuses of ranks without a launcher, which would end them if one fails, and the seconds from the first
    rank's end to the last one's.

    A rank that sees the timeout sleeps four times as long as it would wait for traces of the others, a minute by
    default, whether it writes any or not.
    """
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    place = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "WORLD_SIZE": str(world)}
    at_once = {"TORCH_NCCL_DUMP_ON_TIMEOUT": "0", "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "1000"}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(RANKS), name, *options],
            env={**os.environ, **place, **at_once, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for rank in range(world)
    ]
    begin, ends = time.monotonic(), dict[int, float]()
    try:
        while len(ends) < world:
            now = time.monotonic()
            if now > begin + 2 * LONGEST_S:
                raise TimeoutError(f"after {now - begin:.0f} s, {len(ends)} of {world} ranks have ended")
            ends |= {number: now for number, rank in enumerate(ranks) if number not in ends and rank.poll() is not None}
            time.sleep(0.1)
        return [rank.wait() for rank in ranks], max(ends.values()) - min(ends.values())
    finally:
        for rank in ranks:
            rank.kill()


@instantiate_parametrized_tests
class TestDistributed(TestCase):
    def setUp(self) -> None:
        super().setUp()
        if torch.cuda.is_available() and is_nccl_a_stub():
            self.skipTest("this torch needs a newer NCCL than is installed")

    def check(self, name: str, world: int) -> dict[str, Any]:
        ended = run(name, world)
        self.assertEqual(ended.returncode, 0, f"{ended.stdout[-2000:]}\n{ended.stderr[-6000:]}")
        (line,) = [line for line in ended.stdout.splitlines() if line.startswith("FACTS ")]
        facts: dict[str, Any] = json.loads(line.removeprefix("FACTS "))
        self.assertGreater(facts["replays"], 0, str(facts))
        recordings = facts["recordings"]
        self.assertEqual(recordings[-1], recordings[SETTLES - 1], str(facts))
        self.assertEqual(facts["copied"], COPIED[name], str(facts))
        return facts

    @requires_cuda
    @parametrize("name", COPIED)
    def test_one_rank(self, name: str) -> None:
        self.check(name, 1)

    @requires_two_gpus
    @parametrize("name", COPIED)
    def test_several_ranks(self, name: str) -> None:
        self.check(name, 4 if torch.cuda.device_count() > 3 else 2)

    @requires_two_gpus
    @parametrize("name", ["a_rank_raises", "a_rank_dies"])
    def test_the_timeout_of_nccl_ends_the_others(self, name: str) -> None:
        """No launcher ends the ranks, and no replay waits forever: the timeout is 40 s."""
        statuses, seconds = run_alone(name, 2)
        self.assertNotIn(0, statuses)
        self.assertLess(seconds, 100)


@instantiate_parametrized_tests
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
        run_threads(threads, failures, 180)
        self.assertGreater(pygraph_trees.report().replays, 20)  # since the reset, the main thread has used no graphs


if __name__ == "__main__":
    run_tests()
