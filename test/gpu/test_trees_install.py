"""Patches that are installed and uninstalled while managers and recordings exist.

Each program runs under upstream's trees and under ours with every feature off (``parity.py``), and must show the same
facts. Eager is the oracle for values.
"""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

import torch
import torch._inductor.cudagraph_trees as trees
from parity import OURS, ParityTestCase
from torch.testing._internal.common_utils import instantiate_parametrized_tests, parametrize, run_tests

if TYPE_CHECKING:
    from parity import Context


def class_of_manager() -> str:
    manager = trees.get_manager(torch.cuda.current_device(), create_if_none_exists=False)
    return type(manager).__module__.partition(".")[0]


def change(ctx: Context, is_installed: bool) -> None:
    """Uninstalls the patches if they are installed, and installs them otherwise."""
    (ctx.uninstall if is_installed else ctx.install)()


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
            for step in range(5):
                torch.compiler.cudagraph_mark_step_begin()
                y = f(torch.randn(4, 8, device=ctx.device))
                if step == after:
                    change(ctx, is_installed)
                ctx.record(g(y), y)

        self.assertEqual(self.parity(program, installed=is_installed).tree.shape, ((0, ((1, ()),)),))

    def test_install_between_forward_and_backward(self) -> None:
        def program(ctx: Context) -> None:
            model = torch.nn.Linear(8, 4, device=ctx.device)
            compiled = ctx.compile(model)
            for step in range(6):
                y = compiled(torch.randn(4, 8, device=ctx.device))
                if step == 3:
                    ctx.install()
                y.square().sum().backward()
                ctx.record(y, model.weight.grad)
                model.zero_grad()

        self.assertEqual(self.parity(program, installed=False).tree.shape, ((0, ((1, ()),)),))

    def test_on_and_off_again_and_again(self) -> None:
        def program(ctx: Context) -> None:
            f = ctx.compile(lambda x: x * 2 + 1)
            for step in range(8):
                change(ctx, step % 2 == 1)
                ctx.record(f(torch.randn(4, 8, device=ctx.device)))

        self.assertEqual(self.parity(program).tree.recordings, 1)

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


instantiate_parametrized_tests(TestTreeInstall)

if __name__ == "__main__":
    run_tests()
