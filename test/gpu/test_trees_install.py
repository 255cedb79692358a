"""Patches that are installed and uninstalled while managers and recordings exist.

Each program runs under upstream's trees and under ours with every feature off (``parity.py``), and must show the same
facts. Eager is the oracle for values.
"""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any

import torch
import torch._inductor.compile_fx as compile_fx
import torch._inductor.config
import torch._inductor.cudagraph_trees as trees
from parity import OURS, ParityTestCase
from torch.testing._internal.common_utils import run_tests

if TYPE_CHECKING:
    from parity import Context


def patched_names() -> dict[str, Any]:
    """The objects under the names that the drop-in replaces."""
    names = ("CUDAGraphNode", "CUDAGraphTreeManager", "cudagraphify_impl", "cudagraphify", "TreeManagerContainer")
    return {
        **{f"cudagraph_trees.{name}": getattr(trees, name) for name in names},
        "compile_fx.cudagraphify": compile_fx.cudagraphify,
    }


def class_of_manager() -> str:
    manager = trees.get_manager(torch.cuda.current_device(), create_if_none_exists=False)
    return type(manager).__module__.partition(".")[0]


class TestTreeInstall(ParityTestCase):
    def test_install_after_the_first_compilation(self) -> None:
        def program(ctx: Context) -> None:
            f = ctx.compile(lambda x: x * 2 + 1)
            for _ in range(4):
                ctx.record(f(torch.randn(4, 8, device=ctx.device)))
            ctx.install()
            for _ in range(4):
                ctx.record(f(torch.randn(4, 8, device=ctx.device)))
            g = ctx.compile(lambda x: x.sin())
            for _ in range(4):
                ctx.record(g(torch.randn(4, 8, device=ctx.device)))
                ctx.record(f(torch.randn(4, 8, device=ctx.device)))

        self.assertEqual(self.parity(program, installed=False).tree.shape, ((0, ()), (1, ())))

    def test_install_between_warmup_and_recording(self) -> None:
        def program(ctx: Context) -> None:
            f = ctx.compile(lambda x: x * 2 + 1)
            ctx.record(f(torch.randn(4, 8, device=ctx.device)))
            ctx.install()
            for _ in range(4):
                ctx.record(f(torch.randn(4, 8, device=ctx.device)))

        self.assertEqual(self.parity(program, installed=False).tree.recordings, 1)

    def test_install_in_the_middle_of_a_path(self) -> None:
        for after in (0, 1, 3):
            with self.subTest(after=after):

                def program(ctx: Context, after: int = after) -> None:
                    f = ctx.compile(lambda x: x * 2)
                    g = ctx.compile(lambda y: y + 1)
                    for step in range(5):
                        torch.compiler.cudagraph_mark_step_begin()
                        y = f(torch.randn(4, 8, device=ctx.device))
                        if step == after:
                            ctx.install()
                        ctx.record(g(y), y)

                self.assertEqual(self.parity(program, installed=False).tree.shape, ((0, ((1, ()),)),))

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

    def test_uninstall_while_ours_is_alive(self) -> None:
        def program(ctx: Context) -> None:
            f = ctx.compile(lambda x: x * 2 + 1)
            for _ in range(4):
                ctx.record(f(torch.randn(4, 8, device=ctx.device)))
            ctx.uninstall()
            for _ in range(4):
                ctx.record(f(torch.randn(4, 8, device=ctx.device)))
            g = ctx.compile(lambda x: x.sin())
            for _ in range(4):
                ctx.record(g(torch.randn(4, 8, device=ctx.device)))
                ctx.record(f(torch.randn(4, 8, device=ctx.device)))

        self.assertEqual(self.parity(program).tree.shape, ((0, ()), (1, ())))

    def test_uninstall_in_the_middle_of_a_path(self) -> None:
        for after in (0, 1, 3):
            with self.subTest(after=after):

                def program(ctx: Context, after: int = after) -> None:
                    f = ctx.compile(lambda x: x * 2)
                    g = ctx.compile(lambda y: y + 1)
                    for step in range(5):
                        torch.compiler.cudagraph_mark_step_begin()
                        y = f(torch.randn(4, 8, device=ctx.device))
                        if step == after:
                            ctx.uninstall()
                        ctx.record(g(y), y)

                self.assertEqual(self.parity(program).tree.shape, ((0, ((1, ()),)),))

    def test_on_and_off_again_and_again(self) -> None:
        def program(ctx: Context) -> None:
            f = ctx.compile(lambda x: x * 2 + 1)
            for step in range(8):
                (ctx.uninstall if step % 2 else ctx.install)()
                ctx.record(f(torch.randn(4, 8, device=ctx.device)))

        self.assertEqual(self.parity(program).tree.recordings, 1)

    def test_reset_after_install_gives_our_manager(self) -> None:
        def program(ctx: Context) -> None:
            f = ctx.compile(lambda x: x * 2 + 1)
            for _ in range(3):
                ctx.record(f(torch.randn(4, 8, device=ctx.device)))
            if ctx.compiled:
                self.assertEqual(class_of_manager(), "torch")
            ctx.install()
            torch.compiler.reset()
            gc.collect()
            for _ in range(3):
                ctx.record(f(torch.randn(4, 8, device=ctx.device)))
            if ctx.compiled:
                self.assertEqual(class_of_manager(), "pygraph_trees" if ctx.side == OURS else "torch")

        self.assertEqual(self.parity(program, installed=False).tree.recordings, 1)

    def test_twice_is_once(self) -> None:
        import inductor_patches

        inductor_patches.uninstall()
        before = patched_names()
        keys = set(torch._inductor.config._config)
        inductor_patches.install()
        once = patched_names()
        inductor_patches.install()
        twice = patched_names()
        inductor_patches.uninstall()
        after = patched_names()
        self.assertTrue(all(once[name] is twice[name] for name in once))
        self.assertTrue(all(before[name] is after[name] for name in before))
        self.assertIsNot(before["cudagraph_trees.CUDAGraphNode"], once["cudagraph_trees.CUDAGraphNode"])
        self.assertIsNot(before["cudagraph_trees.CUDAGraphTreeManager"], once["cudagraph_trees.CUDAGraphTreeManager"])
        self.assertEqual(set(torch._inductor.config._config), keys)
        inductor_patches.uninstall()
        self.assertTrue(all(value is before[name] for name, value in patched_names().items()))

    def test_status_names_what_is_on(self) -> None:
        import inductor_patches

        inductor_patches.uninstall()
        off = {each.feature: each.state for each in inductor_patches.status()}
        inductor_patches.install()
        on = {each.feature: each.state for each in inductor_patches.status()}
        inductor_patches.uninstall()
        self.assertEqual((off["trees"], on["trees"]), ("off", "on"))


if __name__ == "__main__":
    run_tests()
