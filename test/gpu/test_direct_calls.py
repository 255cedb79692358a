"""Calls of compiled functions without Dynamo's guards, with CUDA graphs: values are the same, and graphs replay."""

from __future__ import annotations

import unittest
from typing import Any

import torch
from indirection import IndirectionTestCase, KeptTestCase
from parity import both_sides
from torch import nn
from torch._inductor import config
from torch.testing._internal.common_utils import run_tests

import pygraph_trees
from pygraph_trees.native import binding
from pygraph_trees.trees.hooks import direct_calls

CALLS = 16


class Program:
    def run_with(self, entry: str, *, is_training: bool) -> tuple[list[Any], int, int, int]:
        """What a model returns and becomes; recordings and replays; calls that skipped guards."""
        torch._dynamo.reset()
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)).to(self.device)  # type: ignore[attr-defined]
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        before, found = (pygraph_trees.report(), direct_calls.counts()[0]), []
        options = {**both_sides(), "triton.pygraph_entry": entry}
        with config.patch(options), torch.set_grad_enabled(is_training):
            call = self.graphed(model.train(is_training))  # type: ignore[attr-defined]
            for i in range(CALLS):
                with config.patch(options):  # a compilation leaves torch's ``deterministic`` off
                    outputs = call(torch.randn(8 if i % 5 else 4, 64, device=self.device))  # type: ignore[attr-defined]
                    if is_training:
                        outputs.square().mean().backward()
                found.append(outputs.detach().clone() if is_training or i % 2 else outputs)
                if is_training:
                    optimizer.step()
                    optimizer.zero_grad()
        torch.cuda.synchronize()
        after = pygraph_trees.report()
        counts = after.recordings - before[0].recordings, after.replays - before[0].replays
        return [*found, *model.state_dict().values()], *counts, direct_calls.counts()[0] - before[1]

    def test_it_does_the_same_without_guards(self) -> None:
        for is_training in (False, True):
            expected = self.run_with("short", is_training=is_training)
            for entry in ("check", "direct"):
                with self.subTest(entry=entry, is_training=is_training):  # type: ignore[attr-defined]
                    found = self.run_with(entry, is_training=is_training)
                    self.assertEqual(found[0], expected[0], rtol=0, atol=0)  # type: ignore[attr-defined]
                    self.assertGreater(found[2], CALLS // 2)  # type: ignore[attr-defined]
                    self.assertGreater(found[3], CALLS // 4)  # type: ignore[attr-defined]
                    self.assertEqual(expected[3], 0)  # type: ignore[attr-defined]


@unittest.skipIf(binding.extension is None, "not built for this torch")
class TestKept(Program, KeptTestCase):
    """Outputs are kept over steps."""


@unittest.skipIf(binding.extension is None, "not built for this torch")
class TestUpstream(Program, IndirectionTestCase):
    """Outputs of an earlier step are overwritten, so steps must begin at the same calls."""

    outputs = "upstream"

    def run_with(self, entry: str, *, is_training: bool) -> tuple[list[Any], int, int, int]:
        found, *counts = super().run_with(entry, is_training=is_training)
        return (found if is_training else found[CALLS:]), *counts  # type: ignore[return-value]


if __name__ == "__main__":
    run_tests()
