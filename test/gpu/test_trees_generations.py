"""Generations: how long outputs stay valid, the error on reading an overwritten one, step marks, resets.

Each program runs under upstream's trees and under ours with every feature off (``parity.py``), and must show the same
facts. With inputs by address, its user must see the same. Eager is the oracle for values.
"""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

import torch
from parity import FLAGS_BY_ADDRESS, OURS, ParityTestCase, run_side
from torch.testing._internal.common_utils import run_tests

if TYPE_CHECKING:
    from parity import Context


def mark_step() -> None:
    torch.compiler.cudagraph_mark_step_begin()


def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2 + 1


class TestTreeGenerations(ParityTestCase):
    by_address = True

    def test_overwritten_outputs_of_the_warmup_and_the_recording(self) -> None:
        def program(ctx: Context) -> None:
            f = ctx.compile(double)
            outputs = [f(torch.randn(4, 8, device=ctx.device)) for _ in range(3)]
            for output in outputs[:2]:
                ctx.raises(lambda output=output: output + 1)
            ctx.raises(lambda: outputs[0].data_ptr())
            ctx.record(outputs[2], outputs[0].shape == outputs[2].shape)

        errors = self.parity(program).errors
        for error in errors[:2]:
            self.assertOverwritten(error)
        self.assertIn("return x * 2 + 1", errors[0].message)
        self.assertIn("cudagraph_mark_step_begin", errors[0].message)

    def test_output_of_a_replay_is_overwritten_in_silence(self) -> None:
        def program(ctx: Context) -> None:
            f = ctx.compile(double)
            for _ in range(2):
                f(torch.randn(4, 8, device=ctx.device))
            old = f(torch.zeros(4, 8, device=ctx.device))
            new = f(torch.ones(4, 8, device=ctx.device))
            ctx.fact("old", old)
            ctx.record(new)

        parity = self.parity(program)
        self.assertEqual(parity.errors, [])
        self.assertEqual(parity.tensors[0], torch.full((4, 8), 3.0))

    def test_view_of_an_overwritten_output(self) -> None:
        def program(ctx: Context) -> None:
            f = ctx.compile(double)
            for _ in range(3):
                first = f(torch.randn(4, 8, device=ctx.device))
                view, detached = first[1], first.detach()
                ctx.record(view, detached)
                f(torch.randn(4, 8, device=ctx.device))
                ctx.raises(lambda view=view: view + 1)
                ctx.raises(lambda detached=detached: detached.sum())
                del first, view, detached

        self.assertOverwritten(self.parity(program).errors[0])

    def test_outputs_of_a_step_are_valid_until_the_next_mark(self) -> None:
        def program(ctx: Context) -> None:
            f = ctx.compile(double)
            for _ in range(4):
                mark_step()
                outputs = [f(torch.randn(4, 8, device=ctx.device)) for _ in range(3)]
                ctx.record(*outputs)

        tree = self.parity(program).tree
        self.assertEqual(tree.shape, ((0, ((0, ((0, ()),)),)),))

    def test_marks_begin_late(self) -> None:
        def program(ctx: Context) -> None:
            f = ctx.compile(double)
            g = ctx.compile(lambda y: y.cos())
            for step in range(8):
                if step > 3:
                    mark_step()
                y = f(torch.randn(4, 8, device=ctx.device))
                ctx.record(y)
                ctx.record(g(y.clone() if step < 4 else y))

        tree = self.parity(program).tree
        self.assertEqual(tree.functions, 2)
        self.assertEqual(len(tree.roots), 2)
        self.assertEqual(tree.recordings, 3)

    def test_reset_of_the_trees(self) -> None:
        def program(ctx: Context) -> None:
            f = ctx.compile(double)
            ctx.call(f, count=3)
            ctx.tree("before")
            if ctx.compiled:
                torch._inductor.cudagraph_trees.reset_cudagraph_trees()
                ctx.raises(f, torch.randn(4, 8, device=ctx.device))
            ctx.tree("after")
            torch._dynamo.reset()
            torch.manual_seed(1)
            ctx.call(f, count=3)

        parity = self.parity(program, by_address=False)
        self.assertError(parity.errors[0], "AssertionError", "after shutdown")
        self.assertIsNone(parity.trees["after"])
        self.assertEqual((parity.trees["before"].recordings, parity.tree.recordings), (1, 1))

    def test_reset_of_the_trees_with_inputs_by_address(self) -> None:
        """Torch asserts that the trees are there; here, calls run un-graphed."""

        def program(ctx: Context) -> None:
            f = ctx.compile(double)
            for call in range(8):
                if call == 4:
                    torch._inductor.cudagraph_trees.reset_cudagraph_trees()
                x = torch.randn(4, 8, device=ctx.device)
                ctx.record(f(x) - double(x))

        found = run_side(program, OURS, flags=FLAGS_BY_ADDRESS)
        self.assertIsNone(found.crash, found.traceback)
        self.assertLess(max(tensor.abs().max() for tensor in found.tensors), 1e-5)

    def test_pool_goes_back_to_the_device_after_a_reset(self) -> None:
        def program(ctx: Context) -> None:
            f = ctx.compile(double)
            before = torch.cuda.memory_reserved()
            x = torch.randn(1024, 4096, device=ctx.device)
            for _ in range(3):
                ctx.record(f(x)[0])
            ctx.fact("pool", ctx.compiled and torch.cuda.memory_reserved() > before)
            ctx.tree("used")
            del x
            torch.compiler.reset()
            gc.collect()
            torch.cuda.empty_cache()
            ctx.fact("returned", torch.cuda.memory_reserved() - before)

        parity = self.parity(program)
        # An input and an output of 16 MiB each.
        self.assertGreaterEqual(parity.trees["used"].pool_bytes, 2**25)
        self.assertLess(parity.noted("returned"), 2**24)


if __name__ == "__main__":
    run_tests()
