"""Memory of the pool: sharing between recordings, the cost of copied inputs and intermediates, memory that stays.

Each program runs under upstream's trees and under ours with every feature off (``parity.py``), and must show the same
facts. Eager is the oracle for values.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from parity import ParityTestCase
from torch.testing._internal.common_utils import run_tests

if TYPE_CHECKING:
    from parity import Context

MIB = 2**20


def megabytes(count: int, device: str) -> torch.Tensor:
    return torch.ones(count * MIB // 4, device=device)


class TestTreeMemory(ParityTestCase):
    def test_roots_share_their_memory(self) -> None:
        def program(ctx: Context) -> None:
            functions = [ctx.compile(lambda x: x * 2), ctx.compile(lambda x: x + 3), ctx.compile(lambda x: x.neg())]
            for step in range(9):
                ctx.record(functions[step // 3](megabytes(32, ctx.device))[:3])

        tree = self.parity(program).tree
        self.assertEqual(len(tree.roots), 3)
        # An input and an output of 32 MiB: three recordings take less than two without sharing.
        self.assertLess(tree.pool_bytes, 128 * MIB)

    def test_branches_share_their_memory(self) -> None:
        def program(ctx: Context) -> None:
            trunk = ctx.compile(lambda x: x * 2)
            branches = [ctx.compile(lambda y: y + 1), ctx.compile(lambda y: y.neg())]
            for step in range(8):
                torch.compiler.cudagraph_mark_step_begin()
                y = trunk(megabytes(32, ctx.device))
                ctx.record(branches[step // 3 % 2](y)[:3], y[:3])

        tree = self.parity(program).tree
        self.assertEqual(tree.shape, ((0, ((1, ()), (2, ()))),))
        self.assertLess(tree.pool_bytes, 160 * MIB)

    def test_intermediates_are_not_kept(self) -> None:
        def program(ctx: Context) -> None:
            f = ctx.compile(lambda x, w: (((x @ w) @ w) @ w).sum(0))
            w = torch.eye(512, device=ctx.device)
            torch._dynamo.mark_static_address(w)
            for _ in range(4):
                ctx.record(f(torch.ones(16384, 512, device=ctx.device), w))

        tree = self.parity(program).tree
        # Between steps, the output of 2 KiB and the library's workspace are in use.
        self.assertLess(tree.pool_active_bytes, 40 * MIB)


if __name__ == "__main__":
    run_tests()
