"""Steps, threads and streams: how long outputs stay valid, step marks, resets, and programs with several threads."""

from __future__ import annotations

import contextvars
import gc
import threading
import unittest
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from parity import FLAGS_BY_ADDRESS, OURS, Context, ParityTestCase, in_parity, run_side
from torch._inductor import cudagraph_trees
from torch.testing._internal.common_utils import run_tests

from pygraph_trees.trees.functions.threads import stash


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
    @in_parity(oracle=False, notes=lambda notes: [len(notes), len({type(note.value) for note in notes})] == [4, 1])
    def test_first_call_in_another_thread(ctx: Context) -> None:
        f = ctx.compile(lambda x: x * 2 + 1)
        x = torch.randn(4, 8, device=ctx.device)
        for _ in range(4):
            ctx.fact("result", in_thread(lambda: f(x)))

    @in_parity(recordings=1)
    def test_later_calls_in_another_thread(ctx: Context) -> None:
        f = ctx.compile(lambda x: x * 2 + 1)
        ctx.call(f, count=3)
        for _ in range(3):
            x = torch.randn(4, 8, device=ctx.device)
            torch.cuda.synchronize()
            ctx.fact("elsewhere", in_thread(lambda x=x: f(x).clone()))
        torch.cuda.synchronize()
        ctx.call(f, count=2)

    @refused_before_2_13
    @in_parity(
        oracle=False,
        modes=lambda modes: "FORWARD" in modes,
        notes=lambda notes: [note.label for note in notes].count("backward") == 4,
    )
    def test_backward_in_another_thread(ctx: Context) -> None:
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

    # Each thread compiles for itself: a factor that became dynamic would share the code of an ended thread.
    @in_parity(
        dynamo_config={"specialize_float": True},
        recordings=1,
        trees=lambda trees: [trees[f"thread {factor}"].recordings for factor in (2.0, 3.0, 4.0)] == [1] * 3,
    )
    def test_threads_with_managers_of_their_own(ctx: Context) -> None:
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

    # Upstream of torch 2.15 keeps one of the two.
    @in_parity(recordings=(1, 2).__contains__)
    def test_recorded_on_another_stream(ctx: Context) -> None:
        model = torch.nn.Linear(8, 4, device=ctx.device)
        compiled = ctx.compile(model)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            ctx.train(compiled, model)
        torch.cuda.current_stream().wait_stream(stream)


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

    @in_parity(overwritten=True)
    def test_view_of_an_overwritten_output(ctx: Context) -> None:
        f = ctx.compile(double)
        for _ in range(3):
            first = f(torch.randn(4, 8, device=ctx.device))
            view, detached = first[1], first.detach()
            ctx.record(view, detached)
            f(torch.randn(4, 8, device=ctx.device))
            ctx.raises(lambda view=view: view + 1)
            ctx.raises(lambda detached=detached: detached.sum())
            del first, view, detached

    @in_parity(shape=((0, ((0, ((0, ()),)),)),))
    def test_outputs_of_a_step_are_valid_until_the_next_mark(ctx: Context) -> None:
        f = ctx.compile(double)
        for _ in range(4):
            mark_step()
            outputs = [f(torch.randn(4, 8, device=ctx.device)) for _ in range(3)]
            ctx.record(*outputs)

    @in_parity(functions=2, roots=lambda roots: len(roots) == 2, recordings=3)
    def test_marks_begin_late(ctx: Context) -> None:
        f = ctx.compile(double)
        g = ctx.compile(lambda y: y.cos())
        for step in range(8):
            if step > 3:
                mark_step()
            y = f(torch.randn(4, 8, device=ctx.device))
            ctx.record(y)
            ctx.record(g(y.clone() if step < 4 else y))

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
