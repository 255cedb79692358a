"""The parity harness itself: it must report every difference between the sides.

Each test plants one difference: in values, recordings, errors, counters, warnings, memory, random state or classes.
Equal programs must pass.
"""

from __future__ import annotations

import logging
import warnings
from typing import TYPE_CHECKING

import parity
import torch
from parity import OURS, UPSTREAM, Context, ParityError, ParityTestCase, run_side
from torch._dynamo.utils import counters
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

    def test_equal_programs_pass(self) -> None:
        self.assertEqual(self.parity(calls).tree.recordings, 1)

    def test_other_values(self) -> None:
        def program(ctx: Context) -> None:
            calls(ctx, factor=2.0000002 if ctx.side == OURS else 2.0)

        self.assertIn("note 0 (value 0)", self.reported(program))

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

    def test_other_errors(self) -> None:
        def program(ctx: Context) -> None:
            calls(ctx)

            def fail() -> None:
                raise (KeyError if ctx.side == OURS else IndexError)("the same words")

            ctx.raises(fail)

        self.assertIn("builtins.KeyError", self.reported(program))

    def test_other_end(self) -> None:
        def program(ctx: Context) -> None:
            calls(ctx)
            if ctx.side == OURS:
                raise RuntimeError("only here")

        self.assertIn("only here", self.reported(program))

    def test_other_counters(self) -> None:
        def program(ctx: Context) -> None:
            calls(ctx)
            counters["inductor"]["cudagraph_skips"] += ctx.side == OURS

        self.assertIn("cudagraph_skips", self.reported(program))

    def test_other_warnings_and_log_lines(self) -> None:
        def program(ctx: Context) -> None:
            calls(ctx)
            if ctx.side == OURS:
                warnings.warn("a new warning", stacklevel=1)
                logging.getLogger("torch._inductor.cudagraph_trees").warning("a new line")

        report = self.reported(program)
        self.assertIn("a new warning", report)
        self.assertIn("a new line", report)

    def test_other_memory(self) -> None:
        def program(ctx: Context) -> None:
            f = ctx.compile(lambda x: x * 2)
            for _ in range(4):
                ctx.record(f(torch.ones((2**22 if ctx.side == OURS else 2**21), device=ctx.device))[:4])

        self.assertIn("pool_bytes", self.reported(program))

    def test_other_random_state(self) -> None:
        def program(ctx: Context) -> None:
            calls(ctx)
            if ctx.side == OURS:
                torch.rand(4, device=ctx.device)

        self.assertIn("random", self.reported(program))

    def test_what_eager_does_not_confirm(self) -> None:
        def program(ctx: Context) -> None:
            calls(ctx, factor=2.0 if ctx.compiled else 3.0)

        with self.assertRaisesRegex(ParityError, "not as in eager"):
            self.parity(program)

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

    def test_what_only_a_first_run_shows_is_forgiven(self) -> None:
        seen: list[str] = []

        def program(ctx: Context) -> None:
            if not seen:
                warnings.warn("once a process", stacklevel=1)
            seen.append(ctx.side)
            calls(ctx)

        self.parity(program, oracle=False)
        self.assertEqual(seen, [UPSTREAM, OURS, UPSTREAM])

    def test_nothing_of_a_program_stays(self) -> None:
        before = torch.cuda.memory_allocated()
        self.parity(calls)
        self.assertLessEqual(torch.cuda.memory_allocated(), before)
        self.assertIsNone(parity.device_manager(torch.cuda.current_device())[0])


if __name__ == "__main__":
    run_tests()
