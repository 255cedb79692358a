"""The ``cudagraphs`` backend, and upstream's settings for graph trees.

Each program runs under upstream's trees and under ours with every feature off (``parity.py``), and must show the same
facts. Eager is the oracle for values.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from parity import WHOLE_GRAPH, ParityTestCase, calls
from torch.testing._internal.common_utils import instantiate_parametrized_tests, parametrize, run_tests

if TYPE_CHECKING:
    from parity import Context


def products(x: torch.Tensor) -> torch.Tensor:
    return (x @ x.t()).relu() + 1


RECORDED = {  # with one recording
    "whole_graph": WHOLE_GRAPH,
    "no_checks_of_the_pool": {"triton.slow_path_cudagraph_asserts": False},
    "synchronized_replays": {"triton.force_cudagraph_sync": True},
    "history_of_allocations": {"triton.cudagraph_trees_history_recording": True},
}


class TestCudagraphsBackend(ParityTestCase):
    def test_inference(self) -> None:
        def program(ctx: Context) -> None:
            model = torch.nn.Linear(8, 4, device=ctx.device)
            compiled = ctx.compile(model, backend="cudagraphs")
            with torch.no_grad():
                ctx.call(compiled)

        self.assertEqual(self.parity(program).tree.recordings, 1)

    def test_training(self) -> None:
        def program(ctx: Context) -> None:
            model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh()).to(ctx.device)
            compiled = ctx.compile(model, backend="cudagraphs")
            ctx.train(compiled, model)

        tree = self.parity(program).tree
        self.assertEqual((tree.modes, tree.recordings), (("FORWARD", "BACKWARD"), 2))

    def test_mutated_input(self) -> None:
        def program(ctx: Context) -> None:
            @ctx.compile(backend="cudagraphs")
            def f(x: torch.Tensor) -> torch.Tensor:
                x.add_(1)
                return x * 2

            for _ in range(4):
                x = torch.randn(4, 8, device=ctx.device)
                ctx.record(f(x), x)

        # The backend keeps the mutation outside of the graph that it captures.
        parity = self.parity(program)
        self.assertEqual(parity.counter("cudagraph_skips"), 0)
        self.assertEqual(parity.tree.recordings, 1)

    def test_work_on_the_host(self) -> None:
        program = calls(lambda x: x * 2 + torch.arange(8).to(x.device), backend="cudagraphs", count=3)
        parity = self.parity(program)
        self.assertEqual(parity.counter("cudagraph_skips"), 1)
        self.assertIsNone(parity.tree)


class TestTreeSettings(ParityTestCase):
    @parametrize("name", list(RECORDED))
    def test_recorded(self, name: str) -> None:
        self.assertEqual(self.parity(calls(products), config=RECORDED[name]).tree.recordings, 1)

    def test_nothing_but_warmups(self) -> None:
        tree = self.parity(calls(products), config={"triton.force_cudagraphs_warmup": True}).tree
        self.assertEqual((tree.recordings, tree.state), (0, "WARMUP"))

    def test_without_trees(self) -> None:
        program = calls(lambda x: x.sin() + 1)
        self.assertIsNone(self.parity(program, config={"triton.cudagraph_trees": False}).tree)

    def test_without_graphs_and_with_graphs_by_option(self) -> None:
        self.assertIsNone(self.parity(calls(products, mode="default")).tree)
        tree = self.parity(calls(products, options={"triton.cudagraphs": True})).tree
        self.assertEqual(tree.recordings, 1)

    def test_no_warmup(self) -> None:
        def program(ctx: Context) -> None:
            f = ctx.compile(lambda x: x.sin() + 1)
            for step in range(3):
                ctx.record(f(torch.randn(4, 8, device=ctx.device)))
                ctx.tree(f"step {step}")

        parity = self.parity(program, config={"triton.skip_cudagraph_warmup": True})
        self.assertEqual([parity.trees[f"step {step}"].recordings for step in range(3)], [1, 1, 1])
        self.assertEqual(parity.tree.warmed_up, ())

    def test_checks_of_every_replay(self) -> None:
        def program(ctx: Context) -> None:
            f = ctx.compile(lambda x: x * 2)
            g = ctx.compile(lambda y: (y + 1, y.sin()))
            for _ in range(5):
                torch.compiler.cudagraph_mark_step_begin()
                y = f(torch.randn(4, 8, device=ctx.device))
                ctx.record(*g(y), y)

        self.assertEqual(self.parity(program, config={"triton.fast_path_cudagraph_asserts": True}).tree.depth, 2)

    def test_chosen_sizes(self) -> None:
        def program(ctx: Context) -> None:
            f = ctx.compile(lambda x: x.sin() * x.size(0))
            x = torch.randn(8, 8, device=ctx.device)
            torch._dynamo.mark_dynamic(x, 0)
            ctx.record(f(x))
            for size in (4, 4, 4, 6, 6, 6, 8, 8, 4):
                ctx.record(f(torch.randn(size, 8, device=ctx.device)))

        tree = self.parity(program, config={"triton.cudagraph_capture_sizes": (4, 8)}).tree
        self.assertEqual((tree.functions, tree.recordings), (2, 2))

    def test_changing_shapes_are_skipped(self) -> None:
        def program(ctx: Context) -> None:
            f = ctx.compile(lambda x: x.sin() * x.size(0), dynamic=True)
            for size in (4, 4, 4, 6):
                ctx.record(f(torch.randn(size, 8, device=ctx.device)))

        config = {"triton.cudagraph_skip_dynamic_graphs": True}
        self.assertIsNone(self.parity(program, config=config).tree)
        whole = self.parity(program, config={**config, **WHOLE_GRAPH})
        self.assertEqual(whole.counter("cudagraph_skips"), 1)

    def test_too_many_recordings(self) -> None:
        def program(ctx: Context) -> None:
            model = torch.nn.Linear(8, 8, device=ctx.device)
            f = ctx.compile(model)
            with torch.no_grad():
                for _ in range(6):
                    model.weight.data = model.weight.data + 1
                    ctx.call(f, count=2)

        # If modules are inlined, torch 2.11 has no such limit.
        parity = self.parity(
            program,
            config={"triton.cudagraph_unexpected_rerecord_limit": 2},
            dynamo_config={"inline_inbuilt_nn_modules": False},
        )
        self.assertGreaterEqual(parity.tree.recordings, 2)

    def test_frozen_parameters(self) -> None:
        def program(ctx: Context) -> None:
            model = torch.nn.Linear(8, 4, device=ctx.device).eval()
            compiled = ctx.compile(model)
            with torch.no_grad():
                ctx.call(compiled)

        tree = self.parity(program, config={"freezing": True}).tree
        self.assertEqual(tree.recordings, 1)


instantiate_parametrized_tests(TestTreeSettings)

if __name__ == "__main__":
    run_tests()
