"""The ``cudagraphs`` backend, upstream's settings for graph trees, and patches that go on and off meanwhile."""

from __future__ import annotations

import gc

import torch
import torch._inductor.cudagraph_trees as trees
from parity import OURS, WHOLE_GRAPH, Context, ParityTestCase, calls, in_parity, marked
from torch.testing._internal.common_utils import instantiate_parametrized_tests, parametrize, run_tests


def products(x: torch.Tensor) -> torch.Tensor:
    return (x @ x.t()).relu() + 1


RECORDED = {  # with one recording
    "whole_graph": WHOLE_GRAPH,
    "no_checks_of_the_pool": {"triton.slow_path_cudagraph_asserts": False},
    "synchronized_replays": {"triton.force_cudagraph_sync": True},
    "history_of_allocations": {"triton.cudagraph_trees_history_recording": True},
}


class TestCudagraphsBackend(ParityTestCase):
    @in_parity(recordings=1)
    def test_inference(ctx: Context) -> None:
        model = torch.nn.Linear(8, 4, device=ctx.device)
        compiled = ctx.compile(model, backend="cudagraphs")
        with torch.no_grad():
            ctx.call(compiled)

    @in_parity(modes=("FORWARD", "BACKWARD"), recordings=2)
    def test_training(ctx: Context) -> None:
        model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh()).to(ctx.device)
        compiled = ctx.compile(model, backend="cudagraphs")
        ctx.train(compiled, model)

    # The backend keeps the mutation outside of the graph that it captures.
    @in_parity(skips=0, recordings=1)
    def test_mutated_input(ctx: Context) -> None:
        @ctx.compile(backend="cudagraphs")
        def f(x: torch.Tensor) -> torch.Tensor:
            x.add_(1)
            return x * 2

        for _ in range(4):
            x = torch.randn(4, 8, device=ctx.device)
            ctx.record(f(x), x)

    def test_work_on_the_host(self) -> None:
        program = calls(lambda x: x * 2 + torch.arange(8).to(x.device), backend="cudagraphs", count=3)
        parity = self.parity(program)
        self.assertEqual(parity.counter("cudagraph_skips"), 1)
        self.assertIsNone(parity.tree)


@instantiate_parametrized_tests
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

    @in_parity(
        config={"triton.skip_cudagraph_warmup": True},
        warmed_up=(),
        trees=lambda trees: [trees[f"step {step}"].recordings for step in range(3)] == [1] * 3,
    )
    def test_no_warmup(ctx: Context) -> None:
        f = ctx.compile(lambda x: x.sin() + 1)
        for step in range(3):
            ctx.record(f(torch.randn(4, 8, device=ctx.device)))
            ctx.tree(f"step {step}")

    @in_parity(config={"triton.fast_path_cudagraph_asserts": True}, depth=2)
    def test_checks_of_every_replay(ctx: Context) -> None:
        f = ctx.compile(lambda x: x * 2)
        g = ctx.compile(lambda y: (y + 1, y.sin()))
        for _ in marked(range(5)):
            y = f(torch.randn(4, 8, device=ctx.device))
            ctx.record(*g(y), y)

    @in_parity(config={"triton.cudagraph_capture_sizes": (4, 8)}, functions=2, recordings=2)
    def test_chosen_sizes(ctx: Context) -> None:
        f = ctx.compile(lambda x: x.sin() * x.size(0))
        x = torch.randn(8, 8, device=ctx.device)
        torch._dynamo.mark_dynamic(x, 0)
        ctx.record(f(x))
        for size in (4, 4, 4, 6, 6, 6, 8, 8, 4):
            ctx.record(f(torch.randn(size, 8, device=ctx.device)))

    def test_changing_shapes_are_skipped(self) -> None:
        def program(ctx: Context) -> None:
            f = ctx.compile(lambda x: x.sin() * x.size(0), dynamic=True)
            for size in (4, 4, 4, 6):
                ctx.record(f(torch.randn(size, 8, device=ctx.device)))

        config = {"triton.cudagraph_skip_dynamic_graphs": True}
        self.assertIsNone(self.parity(program, config=config).tree)
        whole = self.parity(program, config={**config, **WHOLE_GRAPH})
        self.assertEqual(whole.counter("cudagraph_skips"), 1)

    # If modules are inlined, torch 2.11 has no such limit.
    @in_parity(
        config={"triton.cudagraph_unexpected_rerecord_limit": 2},
        dynamo_config={"inline_inbuilt_nn_modules": False},
        least_recordings=2,
    )
    def test_too_many_recordings(ctx: Context) -> None:
        model = torch.nn.Linear(8, 8, device=ctx.device)
        f = ctx.compile(model)
        with torch.no_grad():
            for _ in range(6):
                model.weight.data = model.weight.data + 1
                ctx.call(f, count=2)

    @in_parity(config={"freezing": True}, recordings=1)
    def test_frozen_parameters(ctx: Context) -> None:
        model = torch.nn.Linear(8, 4, device=ctx.device).eval()
        compiled = ctx.compile(model)
        with torch.no_grad():
            ctx.call(compiled)


def class_of_manager() -> str:
    manager = trees.get_manager(torch.cuda.current_device(), create_if_none_exists=False)
    return type(manager).__module__.partition(".")[0]


def change(ctx: Context, is_installed: bool) -> None:
    """Uninstalls the patches if they are installed, and installs them otherwise."""
    (ctx.uninstall if is_installed else ctx.install)()


@instantiate_parametrized_tests
class TestTreeInstall(ParityTestCase):
    @parametrize("is_installed", [False, True])
    def test_a_change_after_the_first_compilation(self, is_installed: bool) -> None:
        def program(ctx: Context) -> None:
            f = ctx.compile(lambda x: x * 2 + 1)
            ctx.call(f)
            change(ctx, is_installed)
            ctx.call(f)
            g = ctx.compile(lambda x: x.sin())
            for _ in range(4):
                ctx.record(g(torch.randn(4, 8, device=ctx.device)))
                ctx.record(f(torch.randn(4, 8, device=ctx.device)))

        self.assertEqual(self.parity(program, installed=is_installed).tree.shape, ((0, ()), (1, ())))

    @parametrize("after", [0, 1, 3])
    @parametrize("is_installed", [False, True])
    def test_a_change_in_the_middle_of_a_path(self, is_installed: bool, after: int) -> None:
        def program(ctx: Context) -> None:
            f = ctx.compile(lambda x: x * 2)
            g = ctx.compile(lambda y: y + 1)
            for step in marked(range(5)):
                y = f(torch.randn(4, 8, device=ctx.device))
                if step == after:
                    change(ctx, is_installed)
                ctx.record(g(y), y)

        self.assertEqual(self.parity(program, installed=is_installed).tree.shape, ((0, ((1, ()),)),))

    @in_parity(installed=False, shape=((0, ((1, ()),)),))
    def test_install_between_forward_and_backward(ctx: Context) -> None:
        model = torch.nn.Linear(8, 4, device=ctx.device)
        compiled = ctx.compile(model)
        for step in range(6):
            y = compiled(torch.randn(4, 8, device=ctx.device))
            if step == 3:
                ctx.install()
            y.square().sum().backward()
            ctx.record(y, model.weight.grad)
            model.zero_grad()

    @in_parity(recordings=1)
    def test_on_and_off_again_and_again(ctx: Context) -> None:
        f = ctx.compile(lambda x: x * 2 + 1)
        for step in range(8):
            change(ctx, step % 2 == 1)
            ctx.record(f(torch.randn(4, 8, device=ctx.device)))

    def test_reset_after_install_gives_our_manager(self) -> None:
        def program(ctx: Context) -> None:
            f = ctx.compile(lambda x: x * 2 + 1)
            ctx.call(f, count=3)
            if ctx.compiled:
                self.assertEqual(class_of_manager(), "torch")
            ctx.install()
            torch.compiler.reset()
            gc.collect()
            ctx.call(f, count=3)
            if ctx.compiled:
                self.assertEqual(class_of_manager(), "pygraph_trees" if ctx.side == OURS else "torch")

        self.assertEqual(self.parity(program, installed=False).tree.recordings, 1)


if __name__ == "__main__":
    run_tests()
