"""Random numbers in captured functions: replays draw new ones, obey seeds, and advance generators as upstream does.

Each program runs under upstream's trees and under ours with every feature off (``parity.py``), and must show the same
facts. With inputs by address, its user must see the same. Eager is the oracle for values.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from parity import ParityTestCase
from torch.testing._internal.common_utils import instantiate_parametrized_tests, parametrize, run_tests

if TYPE_CHECKING:
    from parity import Context


def distinct(tensors: list[torch.Tensor]) -> int:
    """The number of different tensors among ``tensors``."""
    return len({tensor.numpy().tobytes() for tensor in tensors})


class TestTreeRandom(ParityTestCase):
    by_address = True

    @parametrize("eager_kernels", [False, True])
    def test_numbers_differ_from_call_to_call(self, eager_kernels: bool) -> None:
        def program(ctx: Context) -> None:
            f = ctx.compile(lambda x: torch.nn.functional.dropout(x, 0.5) + torch.rand_like(x))
            for _ in range(6):
                ctx.record(f(torch.ones(16, 16, device=ctx.device)))

        parity = self.parity(program, oracle=False, config={"fallback_random": eager_kernels})
        self.assertEqual(distinct(parity.tensors), 6)
        self.assertGreaterEqual(parity.tree.recordings, 1)

    def test_generator_state_repeats_the_numbers(self) -> None:
        def program(ctx: Context) -> None:
            f = ctx.compile(lambda x: x * torch.randn_like(x))
            for _ in range(4):
                f(torch.ones(16, 16, device=ctx.device))
            state = torch.cuda.get_rng_state()
            ctx.record(f(torch.ones(16, 16, device=ctx.device)))
            torch.cuda.set_rng_state(state)
            ctx.record(f(torch.ones(16, 16, device=ctx.device)))

        self.assertEqual(distinct(self.parity(program, oracle=False).tensors), 1)

    def test_mask_of_the_forward_is_that_of_the_backward(self) -> None:
        def program(ctx: Context) -> None:
            f = ctx.compile(lambda x: torch.nn.functional.dropout(x, 0.5) * 2)
            for _ in range(5):
                x = torch.ones(16, 16, device=ctx.device, requires_grad=True)
                y = f(x)
                y.sum().backward()
                ctx.fact("same mask", bool(((y != 0) == (x.grad != 0)).all()))
                ctx.fact("output", y)

        parity = self.parity(program, oracle=False)
        self.assertEqual({note.value for note in parity.notes if note.label == "same mask"}, {True})
        self.assertEqual(distinct(parity.tensors), 5)

    def test_two_recordings_draw_from_one_generator(self) -> None:
        def program(ctx: Context) -> None:
            @ctx.compile
            def f(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
                y = x + torch.rand_like(x)
                torch._dynamo.graph_break()
                return y, y - x + torch.rand_like(x)

            for _ in range(4):
                y, z = f(torch.zeros(8, 8, device=ctx.device))
                ctx.record(y, z, torch.rand(4, device=ctx.device))

        parity = self.parity(program, oracle=False)
        self.assertEqual(distinct(parity.tensors), 12)
        self.assertEqual(parity.tree.depth, 2)


instantiate_parametrized_tests(TestTreeRandom)

if __name__ == "__main__":
    run_tests()
