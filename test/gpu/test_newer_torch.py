"""Hooks on replays, overrides, policies and settings of CUDA graphs, which torch has since 2.12, 2.14 or 2.15."""

from __future__ import annotations

import contextlib
import unittest
from collections.abc import Iterator
from typing import Any

import torch
from indirection import Facts, IndirectionTestCase, assert_same_bits, compiled
from torch._inductor import config, cudagraph_utils
from torch.cuda import graphs
from torch.testing._internal.common_utils import instantiate_parametrized_tests, parametrize, run_tests

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


@contextlib.contextmanager
def settings(**values: Any) -> Iterator[None]:
    """Sets entries of ``torch._inductor.config.triton``; skips the test if torch does not have them."""
    missing = [name for name in values if not hasattr(torch._inductor.config.triton, name)]
    if missing:
        raise unittest.SkipTest(f"torch {torch.__version__} has no {', '.join(missing)}")
    with torch._inductor.config.patch({f"triton.{name}": value for name, value in values.items()}):
        yield


@instantiate_parametrized_tests
class TestNewerSettings(IndirectionTestCase):
    def test_outputs_that_are_cloned(self):
        """With upstream's cloning, an output that outlives its step keeps its value."""
        with settings(cudagraph_trees_generation_cloning="user_visible"):
            ways = compiled(lambda x: (x.sin() * 2, x.cos()))
            kept = []
            for call in range(CALLS):
                x = torch.full((64, 33), float(call), device=self.device)
                wanted = ways.plain(x)
                torch.compiler.cudagraph_mark_step_begin()
                found = ways.graphed(x)
                kept.append((found[call % 2], wanted[call % 2].clone()))
                del found
        for call, (found, wanted) in enumerate(kept):
            assert_same_bits(found, wanted, f"call {call}: ")
        facts = Facts.now()
        self.assertEqual((facts.copied_bytes, facts.ungraphed_calls, facts.skips), (0, 0, 0), str(facts))

    @parametrize("action", ["copy", "skip"])
    def test_limit_of_recordings_for_managed_inputs(self, action):
        """An output of another graph that moves is given by address before the limit is reached."""
        with settings(cudagraph_managed_input_rerecord_limit=3, cudagraph_managed_input_rerecord_action=action):
            first = compiled(lambda x: [x.sin() * i for i in range(1, 7)])
            second = compiled(lambda y: y.relu() + y)
            for call in range(3 * CALLS):
                x = torch.full((64, 64), call / 8, device=self.device)
                results = []
                for kind in ("plain", "graphed"):
                    torch.compiler.cudagraph_mark_step_begin()
                    outputs = getattr(first, kind)(x)
                    results.append(getattr(second, kind)(outputs[call * 5 % 6]).clone())
                assert_same_bits(results[1], results[0], f"call {call}: ")
        facts = Facts.now()
        self.assertLessEqual(facts.recordings, 4, str(facts))
        self.assertEqual((facts.copied_bytes, facts.ungraphed_calls, facts.skips), (0, 0, 0), str(facts))

    def test_limit_of_recordings_for_sizes(self):
        """Sizes up to the limit are graphed, and later ones run un-graphed."""
        with settings(cudagraph_dynamic_shape_rerecord_limit=2):
            ways = compiled(lambda x: x.sin() * x.size(0), dynamic=True)
            sizes = [(8 + call % 4, 33) for call in range(3 * CALLS)]
            calls = ([torch.full(size, call / 8, device=self.device)] for call, size in enumerate(sizes))
            facts = self.assertSameCalls(ways, calls)
        self.assertEqual((facts.recordings, facts.copied_bytes), (2, 0), str(facts))
        self.assertGreater(facts.replays, 2 * 3 * CALLS // 4 - 6, str(facts))

    def test_memory_that_the_pool_begins_with(self):
        """The pool has its memory before the first recording, whose inputs are still given by address."""
        with settings(cudagraph_initial_mempool_allocation_gb=0.125):
            before = torch.cuda.memory_reserved()
            ways = compiled(lambda x: (x @ x.mT).relu())
            calls = ([torch.full((64, 33), call / 8, device=self.device)] for call in range(CALLS))
            facts = self.assertSameCalls(ways, calls)
            self.assertGreaterEqual(torch.cuda.memory_reserved() - before, 1 << 27)
        self.assertEqual((facts.recordings, facts.copied_bytes, facts.ungraphed_calls), (1, 0, 0), str(facts))


if __name__ == "__main__":
    run_tests()
