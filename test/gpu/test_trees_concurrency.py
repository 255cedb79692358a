"""Threads and streams in programs that record and replay.

Each program runs under upstream's trees and under ours with every feature off (``parity.py``), and must show the same
facts. With inputs by address, its user must see the same. Eager is the oracle for values.
"""

from __future__ import annotations

import contextvars
import threading
import unittest
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import torch
from parity import ParityTestCase
from torch._inductor import cudagraph_trees
from torch.testing._internal.common_utils import run_tests

from pygraph_trees.trees.functions.threads import stash

if TYPE_CHECKING:
    from collections.abc import Callable

    from parity import Context


def in_thread(work: Callable[[], Any]) -> Any:
    """Runs ``work`` in another thread, with this one's configuration; returns its result, or the error it raised."""
    result: list[Any] = []
    context = contextvars.copy_context()  # since torch 2.12, what a test patches in the configuration is part of it

    def target() -> None:
        try:
            result.append(work())
        except Exception as error:
            result.append(error)

    thread = threading.Thread(target=context.run, args=(target,))
    thread.start()
    thread.join()
    return result[0]


def with_own_manager(work: Callable[[], Any], resets: bool = True) -> Callable[[], Any]:
    """``work`` in a thread with its own graph trees, set up as in servers.

    With ``resets`` the trees are shut down at the end; what was compiled in the thread cannot be called afterwards.
    """

    def run() -> Any:
        trees = cudagraph_trees
        trees.local.tree_manager_containers = {}
        trees.local.tree_manager_locks = defaultdict(threading.Lock)
        stash("tree_manager_containers", trees.local.tree_manager_containers)
        stash("tree_manager_locks", trees.local.tree_manager_locks)
        try:
            return work()
        finally:
            if resets:
                trees.reset_cudagraph_trees()

    return run


refused_before_2_13 = unittest.skipUnless(hasattr(cudagraph_trees, "_initialize_tls"), "torch refuses such a thread")


class TestTreeConcurrency(ParityTestCase):
    by_address = True

    @refused_before_2_13
    def test_first_call_in_another_thread(self) -> None:
        def program(ctx: Context) -> None:
            f = ctx.compile(lambda x: x * 2 + 1)
            x = torch.randn(4, 8, device=ctx.device)
            for _ in range(4):
                ctx.fact("result", in_thread(lambda: f(x)))

        notes = self.parity(program, oracle=False).notes
        self.assertEqual(len(notes), 4)
        self.assertEqual(len({type(note.value) for note in notes}), 1)

    def test_later_calls_in_another_thread(self) -> None:
        def program(ctx: Context) -> None:
            f = ctx.compile(lambda x: x * 2 + 1)
            ctx.call(f, count=3)
            for _ in range(3):
                x = torch.randn(4, 8, device=ctx.device)
                torch.cuda.synchronize()
                ctx.fact("elsewhere", in_thread(lambda x=x: f(x).clone()))
            torch.cuda.synchronize()
            ctx.call(f, count=2)

        self.assertEqual(self.parity(program).tree.recordings, 1)

    @refused_before_2_13
    def test_backward_in_another_thread(self) -> None:
        def program(ctx: Context) -> None:
            model = torch.nn.Linear(8, 4, device=ctx.device)
            compiled = ctx.compile(model)

            def backward(y: torch.Tensor) -> None:
                y.square().sum().backward()
                torch.cuda.synchronize()

            for _ in range(4):
                x = torch.randn(4, 8, device=ctx.device, requires_grad=True)
                y = compiled(x)
                torch.cuda.synchronize()
                ctx.fact("backward", in_thread(lambda y=y: backward(y)))
                ctx.fact("gradients", [x.grad, model.weight.grad])
                model.zero_grad()

        parity = self.parity(program, oracle=False)
        self.assertIn("FORWARD", parity.tree.modes)
        self.assertEqual(len([note for note in parity.notes if note.label == "backward"]), 4)

    def test_threads_with_managers_of_their_own(self) -> None:
        def program(ctx: Context) -> None:
            def work(factor: float) -> list[torch.Tensor]:
                f = ctx.compile(lambda x: x * factor + 1)
                generator = torch.Generator(ctx.device).manual_seed(int(factor))
                outputs = [f(torch.randn(4, 8, device=ctx.device, generator=generator)).clone() for _ in range(4)]
                ctx.tree(f"thread {factor}")
                torch.cuda.synchronize()
                return outputs

            for factor in (2.0, 3.0):
                ctx.record(in_thread(with_own_manager(lambda factor=factor: work(factor))))
            ctx.record(work(4.0))

        # Each thread compiles for itself: a factor that became dynamic would share the code of an ended thread.
        parity = self.parity(program, dynamo_config={"specialize_float": True})
        self.assertEqual([parity.trees[f"thread {factor}"].recordings for factor in (2.0, 3.0, 4.0)], [1, 1, 1])
        self.assertEqual(parity.tree.recordings, 1)

    def test_recorded_on_another_stream(self) -> None:
        def program(ctx: Context) -> None:
            model = torch.nn.Linear(8, 4, device=ctx.device)
            compiled = ctx.compile(model)
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                ctx.train(compiled, model)
            torch.cuda.current_stream().wait_stream(stream)

        # Upstream of torch 2.15 keeps one of the two.
        self.assertIn(self.parity(program).tree.recordings, (1, 2))


if __name__ == "__main__":
    run_tests()
