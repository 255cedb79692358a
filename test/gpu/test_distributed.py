"""Programs on one, two and four ranks over NCCL: eager's values, and soon no more recordings."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from packages import is_nccl_a_stub
from parity import requires_cuda, requires_four_gpus, requires_two_gpus
from torch.testing._internal.common_utils import TestCase, instantiate_parametrized_tests, parametrize, run_tests

RANKS = Path(__file__).with_name("ranks.py")
PROGRAMS = ("data_parallel", "fully_sharded", "tensor_parallel", "collective_inside", "collective_between")
LONGEST_S = 150
SETTLES = 3  # steps that may record


def run(name: str, world: int) -> subprocess.CompletedProcess[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world)]
    return subprocess.run([*launcher, str(RANKS), name], capture_output=True, text=True, timeout=LONGEST_S, check=False)


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
        if name == "fully_sharded":  # its gathered parameters move
            self.assertEqual(facts["copied"], 0, str(facts))
        return facts

    @requires_cuda
    @parametrize("name", PROGRAMS)
    def test_one_rank(self, name: str) -> None:
        self.check(name, 1)

    @requires_two_gpus
    @parametrize("name", PROGRAMS)
    def test_two_ranks(self, name: str) -> None:
        self.check(name, 2)

    @requires_four_gpus
    @parametrize("name", PROGRAMS)
    def test_four_ranks(self, name: str) -> None:
        self.check(name, 4)

    @requires_two_gpus
    def test_a_rank_that_raises_ends_the_others(self) -> None:
        begin = time.monotonic()
        ended = run("a_rank_raises", 2)
        self.assertNotEqual(ended.returncode, 0)
        self.assertIn("rank 1 leaves", ended.stderr)
        self.assertLess(time.monotonic() - begin, 100)


instantiate_parametrized_tests(TestDistributed)

if __name__ == "__main__":
    run_tests()
