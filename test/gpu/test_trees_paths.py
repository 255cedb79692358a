"""Paths through the tree, and memory of the pool: liveness, sharing between recordings, functions that die."""

from __future__ import annotations

import gc
from typing import Any

import torch
from parity import Context, ParityTestCase, calls, in_parity, marked
from torch.testing._internal.common_utils import run_tests


class TestTreePaths(ParityTestCase):
    by_address = True

    def test_warmup_recording_replay(self) -> None:
        def program(ctx: Context) -> None:
            f = ctx.compile(lambda x: (x * 2 + 1).relu())
            for step in range(4):
                ctx.record(f(torch.randn(4, 8, device=ctx.device)))
                ctx.tree(f"step {step}")

        parity = self.parity(program)
        self.assertEqual([parity.trees[f"step {step}"].recordings for step in range(4)], [0, 1, 1, 1])
        self.assertEqual(
            [parity.trees[f"step {step}"].state for step in range(3)], ["WARMUP", "RECORDING", "EXECUTION"]
        )
        self.assertEqual(parity.tree.nodes[0].copied_inputs, (0,))
        self.assertEqual(parity.counter("cudagraph_recorded_non_static_inputs"), 1)
        self.assertEqual(parity.counter("cudagraph_skips"), 0)
        self.assertEqual(parity.tree.fail_count, 1)

    def test_chain_of_five(self) -> None:
        def f(x: torch.Tensor) -> torch.Tensor:
            a = x + 1
            torch._dynamo.graph_break()
            b = a * 2
            torch._dynamo.graph_break()
            c = a + b
            torch._dynamo.graph_break()
            d = c.sin() + a
            torch._dynamo.graph_break()
            return a + b + c + d

        program = calls(f)
        tree = self.parity(program).tree
        self.assertEqual((tree.recordings, tree.depth, tree.functions), (5, 5, 5))
        self.assertEqual(len(tree.nodes[-1].managed_inputs), 4)

    @in_parity(shape=((0, ((1, ()), (2, ()))),), fail_count=2, checkpoint_count=lambda count: count >= 2)
    def test_branches_of_functions(ctx: Context) -> None:
        trunk = ctx.compile(lambda x: x.exp() + 1)
        left = ctx.compile(lambda y: y * 2)
        right = ctx.compile(lambda y: y.neg() + 3)
        for branch in marked((left, left, left, right, right, right, left, right)):
            y = trunk(torch.randn(4, 8, device=ctx.device))
            ctx.record(branch(y), y)

    @in_parity(
        shape=((0, ((1, ()), (1, ()))),),
        roots=lambda roots: [len(child.dead_before) for child in roots[0].children] == [1, 0],
    )
    def test_liveness_asks_for_a_second_recording(ctx: Context) -> None:
        held: dict[str, Any] = {"hold": False, "value": None}

        @torch._dynamo.disable
        def maybe_hold(a: torch.Tensor) -> None:
            held["value"] = a if held["hold"] else None

        @ctx.compile
        def f(x: torch.Tensor) -> torch.Tensor:
            b = x + 1
            maybe_hold(x * 2)
            return b * 3

        for hold in (False, False, False, True, True, False, True):
            held["hold"] = hold
            ctx.record(f(torch.randn(4, 8, device=ctx.device)))
            if hold:
                ctx.record(held["value"])
            held["value"] = None

    # Once to warm the new function up, once to record it.
    @in_parity(shape=((0, ((1, ()),)),), checkpoint_count=2)
    def test_step_grows_after_replays(ctx: Context) -> None:
        f = ctx.compile(lambda x: x * 2)
        g = ctx.compile(lambda y: y.cos())
        for step in marked(range(8)):
            y = f(torch.randn(4, 8, device=ctx.device))
            ctx.record(y)
            if step > 3:
                ctx.record(g(y))

    def test_last_function_takes_the_manager_with_it(self) -> None:
        def program(ctx: Context) -> None:
            def f(x: torch.Tensor) -> torch.Tensor:
                return x * 2 + 1

            compiled = ctx.compile(f, keep=False)
            ctx.call(compiled, count=3)
            ctx.tree("alive")
            del compiled
            torch._dynamo.reset_code_caches()
            gc.collect()
            ctx.tree("dead")
            again = ctx.compile(f)
            ctx.call(again, count=3)

        parity = self.parity(program)
        self.assertEqual(parity.trees["alive"].live_functions, 1)
        gone = parity.trees["dead"] is None
        self.assertEqual((parity.tree.recordings, parity.tree.functions), (1, 1) if gone else (2, 2))


MIB = 2**20


def megabytes(count: int, device: str) -> torch.Tensor:
    return torch.ones(count * MIB // 4, device=device)


class TestTreeMemory(ParityTestCase):
    # An input and an output of 32 MiB: three recordings take less than two without sharing.
    @in_parity(roots=lambda roots: len(roots) == 3, pool_bytes=lambda nbytes: nbytes < 128 * MIB)
    def test_roots_share_their_memory(ctx: Context) -> None:
        functions = [ctx.compile(lambda x: x * 2), ctx.compile(lambda x: x + 3), ctx.compile(lambda x: x.neg())]
        for step in range(9):
            ctx.record(functions[step // 3](megabytes(32, ctx.device))[:3])

    @in_parity(shape=((0, ((1, ()), (2, ()))),), pool_bytes=lambda nbytes: nbytes < 160 * MIB)
    def test_branches_share_their_memory(ctx: Context) -> None:
        trunk = ctx.compile(lambda x: x * 2)
        branches = [ctx.compile(lambda y: y + 1), ctx.compile(lambda y: y.neg())]
        for step in marked(range(8)):
            y = trunk(megabytes(32, ctx.device))
            ctx.record(branches[step // 3 % 2](y)[:3], y[:3])

    # Between steps, the output of 2 KiB and the library's workspace are in use.
    @in_parity(pool_active_bytes=lambda nbytes: nbytes < 40 * MIB)
    def test_intermediates_are_not_kept(ctx: Context) -> None:
        f = ctx.compile(lambda x, w: (((x @ w) @ w) @ w).sum(0))
        w = torch.eye(512, device=ctx.device)
        torch._dynamo.mark_static_address(w)
        for _ in range(4):
            ctx.record(f(torch.ones(16384, 512, device=ctx.device), w))


if __name__ == "__main__":
    run_tests()
