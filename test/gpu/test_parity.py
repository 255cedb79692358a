"""The parity harness itself: it must report every difference between the sides.

Each test plants one difference that only a GPU shows: in recordings, memory or classes. The others are in
``test/cpu/test_parity_harness.py``. Equal programs must pass.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import parity
import torch
from parity import OURS, UPSTREAM, Context, ParityError, ParityTestCase, run_side
from torch.testing._internal.common_utils import run_tests

if TYPE_CHECKING:
    from collections.abc import Callable


def calls(ctx: Context, count: int = 4, factor: float = 2.0) -> None:
    f = ctx.compile(lambda x: x * factor)
    for _ in range(count):
        ctx.record(f(torch.randn(4, 8, device=ctx.device)))


class TestParityOfTheHarness(ParityTestCase):
    def reported(self, program: Callable[[Context], None]) -> str:
        """The harness's report on a program that behaves differently under our trees."""
        with self.assertRaises(ParityError) as raised:
            self.parity(program, oracle=False)
        return str(raised.exception)

    def test_other_recordings(self) -> None:
        def program(ctx: Context) -> None:
            model = torch.nn.Linear(8, 4, device=ctx.device)
            compiled = ctx.compile(model)
            with torch.no_grad():
                for step in range(5):
                    if step == 3 and ctx.side == OURS:
                        model.weight.data = model.weight.data.clone()
                    ctx.record(compiled(torch.randn(4, 8, device=ctx.device)))

        report = self.reported(program)
        self.assertIn("recordings 0 (end)", report)
        self.assertNotIn("note", report)

    def test_other_memory(self) -> None:
        def program(ctx: Context) -> None:
            f = ctx.compile(lambda x: x * 2)
            for _ in range(4):
                ctx.record(f(torch.ones((2**22 if ctx.side == OURS else 2**21), device=ctx.device))[:4])

        self.assertIn("pool_bytes", self.reported(program))

    def test_wrong_classes(self) -> None:
        import inductor_patches

        def program(ctx: Context) -> None:
            if ctx.side == OURS:
                ctx._leave()
            else:
                inductor_patches.install()
            calls(ctx)

        for side in (UPSTREAM, OURS):
            with self.subTest(side=side), self.assertRaisesRegex(ParityError, "should be"):
                run_side(program, side)
        inductor_patches.uninstall()

    def test_nothing_of_a_program_stays(self) -> None:
        before = torch.cuda.memory_allocated()
        self.parity(calls)
        self.assertLessEqual(torch.cuda.memory_allocated(), before)
        self.assertIsNone(parity.device_manager(torch.cuda.current_device())[0])


if __name__ == "__main__":
    run_tests()
