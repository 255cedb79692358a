"""Hooks on replays, overrides and policies of CUDA graphs, which torch has since 2.12 or 2.14."""

from __future__ import annotations

import unittest
from typing import Any

import torch
from indirection import Facts, IndirectionTestCase, assert_same_bits, compiled
from torch._inductor import config, cudagraph_utils
from torch.cuda import graphs
from torch.testing._internal.common_utils import run_tests

import pygraph_trees
from pygraph_trees.reasons import Reason

CALLS = 12


def waves(x: torch.Tensor) -> torch.Tensor:
    return (x @ x.mT).sin() + x.size(0)


class TestNewerTorch(IndirectionTestCase):
    def inputs(self) -> Any:
        return ([torch.full((64, 33), call / 8, device=self.device)] for call in range(CALLS))

    @unittest.skipUnless(hasattr(graphs, "register_graph_replay_start_hook"), "torch has no hooks on replays")
    def test_hooks_on_replays(self) -> None:
        """Each launch of the fast path calls them, and so does a hook on the graph alone."""
        ways, events, own = compiled(waves), [], []

        def register(graph: Any) -> None:
            if graph not in own:
                own.append(graph)
                graph.register_replay_start_hook(lambda _: events.append("own"))

        add = (
            graphs.register_graph_instantiate_hook(register),
            graphs.register_graph_replay_start_hook(lambda graph: events.append("start")),
            graphs.register_graph_replay_end_hook(lambda graph: events.append("end")),
        )
        try:
            self.assertSameCalls(ways, self.inputs())
            before, replays = len(events), Facts.now().replays
            self.assertSameCalls(ways, self.inputs())
        finally:
            for handle in add:
                handle.remove()
        launched = Facts.now().replays - replays
        self.assertGreater(launched, 0)
        self.assertEqual(events[before:], ["start", "own", "end"] * launched)

    @unittest.skipUnless(hasattr(torch._dynamo, "override_cudagraphs"), "torch has no override_cudagraphs")
    def test_a_backward_without_its_graph(self) -> None:
        """Steps begin as they do with one, so nothing is recorded again."""
        ways = compiled(torch._dynamo.override_cudagraphs(bwd=False)(waves))
        for call in range(CALLS):
            x = torch.full((64, 33), call / 8, device=self.device)
            found = []
            for kind in ("plain", "graphed"):
                given = x.clone().requires_grad_()
                getattr(ways, kind)(given).sum().backward()
                found.append(given.grad)
            assert_same_bits(found[1], found[0], f"call {call}: ")
        functions = pygraph_trees.report().functions
        self.assertEqual([function.mode for function in functions], ["forward"] * len(functions))
        self.assertLessEqual(Facts.now().recordings, 2 * len(functions))
        self.assertIn(Reason.OVERRIDDEN(), [graph.dropped for graph in pygraph_trees.report().graphs])

    @unittest.skipUnless(hasattr(config, "cudagraph_policy"), "torch has no policies")
    def test_policies(self) -> None:
        """Torch's own makes graphs of ours, one of the program makes its own, and is called for each call."""
        calls: list[None] = []

        class Own(cudagraph_utils.CUDAGraphPolicy):
            def cudagraphify(self, model: Any, *args: Any, **kwargs: Any) -> Any:
                run = super().cudagraphify(model, *args, **kwargs)
                return lambda inputs: calls.append(None) or run(inputs)

        for policy, counted in ((cudagraph_utils.CUDAGraphPolicy(), 0), (Own(), CALLS)):
            torch._dynamo.reset()
            with config.patch(cudagraph_policy=policy):
                facts = self.assertSameCalls(compiled(waves), self.inputs())
            self.assertEqual((len(calls), facts.copied_bytes, facts.skips), (counted, 0, 0), str(facts))
            self.assertGreater(facts.replays, 0)


if __name__ == "__main__":
    run_tests()
