"""The parts of the GPU tests' harness that need no GPU: every difference between both sides is found."""

import logging
import sys
from pathlib import Path

import torch
from torch.testing._internal.common_utils import TestCase, run_tests

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / "gpu"), str(Path(__file__).resolve().parent)]

from parity import OURS, UPSTREAM, ParityError, compare_by_address, compare_sides, run_side

# Programs run on the host, compiled by a backend that captures nothing.
ON_THE_HOST = {"device": "cpu", "graphs": False, "backend": "eager"}


def calls(ctx):
    f = ctx.compile(lambda x: x * 2)
    for _ in range(2):
        ctx.record(f(torch.randn(4, device=ctx.device)))


def by_address(program, **options):
    compare_by_address(program, run_side(program, UPSTREAM, **options), **options)


class TestPrograms(TestCase):
    def test_differences_of_ours_are_reported(self):
        """What a user sees also where inputs are given by address, which records more often."""
        by_address(lambda ctx: (calls(ctx), ctx.fact("recordings", 2 if ctx.side == OURS else 1)), **ON_THE_HOST)
        for name, compares, act in (
            ("value", (compare_sides, by_address), lambda ctx: ctx.record(torch.ones(1))),
            ("error", (compare_sides, by_address), lambda ctx: ctx.raises(int, "a")),
            ("random state", (compare_sides, by_address), lambda ctx: torch.rand(1)),
            ("fact", (compare_sides,), lambda ctx: ctx.fact("more", 1)),
            ("tree", (compare_sides,), lambda ctx: ctx.transcript.trees.update(end={"recordings 0": 1})),
            ("log", (compare_sides,), lambda ctx: logging.getLogger("torch._inductor.cudagraph_trees").warning("new")),
            ("compilation", (compare_sides,), lambda ctx: ctx.compile(lambda x: x + 1)(torch.ones(1))),
        ):
            for compare in compares:
                with self.subTest(name, compare=compare), self.assertRaises(ParityError):
                    compare(lambda ctx, act=act: (calls(ctx), ctx.side == OURS and act(ctx)), **ON_THE_HOST)
        with self.assertRaises(ParityError):  # both sides differ from eager
            compare_sides(lambda ctx: ctx.record(2 if ctx.compiled else 1), **ON_THE_HOST)


if __name__ == "__main__":
    run_tests()
