"""Programs that are prepared for traffic, on a GPU: nothing is recorded or tried afterwards, and values are eager's."""

from __future__ import annotations

import os
import unittest
from collections.abc import Callable
from typing import Any

import torch
from new_program import printed
from selection import SelectionTestCase
from torch import nn
from torch.testing._internal.common_utils import instantiate_parametrized_tests, parametrize, run_tests

import pygraph_trees
from pygraph_trees.indirection.table import builds
from pygraph_trees.report.log import journal
from pygraph_trees.trees.managers import storms

TRAFFIC = 20  # calls of each size

TAILS = """
import json, sys, time
import torch
import pygraph_trees

torch.manual_seed(0)
layers = [m for _ in range(12) for m in (torch.nn.Linear(1024, 1024), torch.nn.GELU())]
model = torch.compile(torch.nn.Sequential(*layers).cuda(), mode="reduce-overhead", dynamic=False)
sizes = [lambda n=n: (torch.randn(n, 1024, device="cuda"),) for n in (1, 8, 64)]
took = [[] for _ in sizes]
with torch.no_grad():
    if sys.argv[1] == "ours":
        print(pygraph_trees.prepare(model, sizes))
    for call in range(-300, 30_000):
        (x,) = sizes[call % 3]()
        torch.cuda.synchronize()
        began = time.perf_counter()
        model(x)
        torch.cuda.synchronize()
        if call >= 0 or sys.argv[1] == "ours":
            took[call % 3].append((time.perf_counter() - began) * 1e3)
print()
print(json.dumps([[t[len(t) // 2], t[int(0.999 * len(t))], t[-1]] for t in map(sorted, took)]))
"""


def happened() -> list[tuple[Any, ...]]:
    return [(*log.happened, log.is_tried, log.is_choosing) for log in journal.functions]


def counted() -> tuple[int, int]:
    """Recordings and un-graphed calls so far."""
    functions = pygraph_trees.report().functions
    return sum(len(f.recordings) for f in functions), sum(f.ungraphed_calls for f in functions)


@instantiate_parametrized_tests
class TestPrepare(SelectionTestCase):
    def setUp(self) -> None:
        super().setUp()
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64), nn.Tanh()).cuda()

    def inputs(self, size: int) -> Callable[[], tuple[torch.Tensor]]:
        return lambda: (torch.randn(size, 64, device="cuda"),)

    @parametrize("dynamic", [True, False])
    def test_traffic_of_prepared_sizes_makes_nothing(self, dynamic: bool) -> None:
        """With dynamic shapes, there are more sizes than get graphs at once; calls come in any order."""
        sizes = range(2, 2 + storms.FIRST_SIZES + 4) if dynamic else (2, 4, 8)
        compiled = torch.compile(self.model, mode="reduce-overhead", dynamic=dynamic)
        with torch.no_grad(), torch._dynamo.config.patch(recompile_limit=64):
            found = pygraph_trees.prepare(compiled, [self.inputs(size) for size in sizes])
            self.assertTrue(found.settled, str(found))
            self.assertTrue(all(size.replays and not size.ungraphed for size in found.sizes), str(found))
            self.assertGreater(sum(size.pool_bytes + size.own_bytes for size in found.sizes), 0)
            self.assertFalse(builds.is_any_under_way())
            before = happened(), counted()
            for call in range(TRAFFIC):
                for size in sizes[:: -1 if call % 2 else 1]:
                    (x,) = self.inputs(size)()
                    torch.testing.assert_close(compiled(x), self.model(x), atol=1e-4, rtol=1e-3)
            self.assertEqual((happened(), counted()), before)

    def test_a_training_step_is_prepared_as_it_is(self) -> None:
        compiled = torch.compile(self.model, mode="reduce-overhead")
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)

        def step(x: torch.Tensor) -> torch.Tensor:
            loss = compiled(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        found = pygraph_trees.prepare(step, [self.inputs(16)])
        self.assertTrue(found.settled, str(found))
        before = happened()
        for _ in range(TRAFFIC):
            step(*self.inputs(16)())
        self.assertEqual(happened(), before)

    def test_a_program_that_pads_to_buckets_itself(self) -> None:
        compiled = torch.compile(self.model, mode="reduce-overhead", dynamic=False)

        def padded(x: torch.Tensor) -> torch.Tensor:
            bucket = 16 if len(x) <= 16 else 32
            return compiled(nn.functional.pad(x, (0, 0, 0, bucket - len(x))))[: len(x)]

        with torch.no_grad():
            self.assertTrue(pygraph_trees.prepare(padded, [self.inputs(16), self.inputs(32)]).settled)
            before, recordings = happened(), counted()
            for size in range(1, 33):
                (x,) = self.inputs(size)()
                torch.testing.assert_close(padded(x), self.model(x), atol=1e-4, rtol=1e-3)
            self.assertEqual((happened(), counted()), (before, recordings))

    @unittest.skipUnless(os.environ.get("TEST_TAILS"), "TEST_TAILS=1 measures, on a quiet host")
    def test_no_call_after_it_is_long(self) -> None:
        """The 99.9th percentile of 10,000 calls of a size, and the longest one; upstream's first 300 do not count."""
        ours = printed(TAILS, "ours", PYGRAPH_SELECTIVE="auto")
        upstream = printed(TAILS, "upstream", PYGRAPH_DISABLE="1")
        print(f"for each size, median, 99.9% and longest in ms: {ours}; upstream {upstream}")
        for (median, late, longest), (*_, its_longest) in zip(ours, upstream, strict=True):
            self.assertLessEqual(late, 1.5 * median)
            self.assertLessEqual(longest, its_longest)


if __name__ == "__main__":
    run_tests()
