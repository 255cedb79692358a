"""Errors in the model, in the recording and on the device, and what works after them."""

from __future__ import annotations

import torch
from isolated import compare_isolated
from parity import Context, ParityTestCase, first_is, in_parity
from torch.testing._internal.common_utils import run_tests

# The action of the operators below when they run; programs set it.
MOOD = {"fail": "", "leak": False}
LEAKED: list[torch.Tensor] = []


@torch.library.custom_op("pygraph_trees_test::moody", mutates_args=())
def moody(x: torch.Tensor) -> torch.Tensor:
    capturing = x.is_cuda and torch.cuda.is_current_stream_capturing()
    if MOOD["fail"] == ("capture" if capturing else "run"):
        raise ValueError(f"the operator fails {'while it is captured' if capturing else 'when it runs'}")
    if MOOD["leak"]:
        LEAKED.append(x * 3)
    return x * 2


@moody.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("pygraph_trees_test::waiting", mutates_args=())
def waiting(x: torch.Tensor) -> torch.Tensor:
    return x * x.sum().item()


@waiting.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def fails_in_recording(ctx: Context) -> None:
    f = ctx.compile(lambda x: moody(x + 1).relu())
    ctx.record(f(torch.randn(4, 8, device=ctx.device)))
    MOOD["fail"] = "capture"
    for _ in range(2):
        ctx.raises(f, torch.randn(4, 8, device=ctx.device))
        ctx.tree()
    MOOD["fail"] = ""
    ctx.call(f)


def waits_while_captured(ctx: Context) -> None:
    f = ctx.compile(lambda x: waiting(x + 1))
    ctx.record(f(torch.ones(4, 8, device=ctx.device)))
    ctx.raises(f, torch.ones(4, 8, device=ctx.device))


def asserts_on_the_device(ctx: Context) -> None:
    f = ctx.compile(lambda table, index: table[index] * 2)
    table = torch.randn(16, 4, device=ctx.device)
    for _ in range(3):
        ctx.record(f(table, torch.tensor([1, 5, 3], device=ctx.device)))
    bad = torch.tensor([1, 5, 3000], device=ctx.device)

    def touch() -> None:
        f(table, bad)
        torch.cuda.synchronize()

    ctx.raises(touch)


def runs_out_of_memory_on_another_branch(ctx: Context) -> None:
    total = torch.cuda.get_device_properties(0).total_memory
    f = ctx.compile(lambda x: x * 2)
    g = ctx.compile(lambda y, w: (y[:, None] * w[None, :]).sin())
    w = torch.randn(16384, device=ctx.device)

    def step(fraction: float | None) -> None:
        torch.compiler.cudagraph_mark_step_begin()
        y = f(torch.randn(16384, device=ctx.device))
        ctx.record(y)
        if fraction is not None:
            torch.cuda.set_per_process_memory_fraction(fraction)
            try:
                ctx.record(g(y, w)[-1])
            finally:
                torch.cuda.set_per_process_memory_fraction(1.0)

    # The product takes 1 GiB. Memory that a failed warmup leaves must be equal to upstream's.
    for fraction in (None, None, None, 2**29 / total, 2**29 / total, 1.0, 1.0):
        ctx.attempt(step, fraction)
        ctx.tree()
    torch.compiler.reset()
    for _ in range(4):
        step(1.0)
    ctx.tree("after")


class TestTreeFailures(ParityTestCase):
    def setUp(self) -> None:
        super().setUp()
        MOOD.update(fail="", leak=False)
        LEAKED.clear()

    @in_parity(oracle=False, depth=2, errors=first_is("ValueError", "the operator fails when it runs"))
    def test_model_fails_in_the_warmup_of_a_child(ctx: Context) -> None:
        f = ctx.compile(lambda x: x * 2)
        g = ctx.compile(lambda y: moody(y).relu())

        def step() -> None:
            torch.compiler.cudagraph_mark_step_begin()
            y = f(torch.randn(4, 8, device=ctx.device))
            ctx.record(y, g(y))

        for number in range(8):
            MOOD["fail"] = "run" if number < 2 else ""
            ctx.attempt(step)
            ctx.tree()
        torch.compiler.reset()
        for _ in range(3):
            step()

    @in_parity(
        oracle=False,
        least_recordings=2,
        errors=lambda errors: [error.type for error in errors] == ["builtins.KeyError"] * 3,
    )
    def test_python_between_graphs_fails(ctx: Context) -> None:
        broken = {"now": False}

        @torch._dynamo.disable
        def check(y: torch.Tensor) -> None:
            if broken["now"]:
                raise KeyError("between two graphs")

        @ctx.compile
        def f(x: torch.Tensor) -> torch.Tensor:
            y = x * 2
            check(y)
            return y + 1

        for step in range(9):
            broken["now"] = step in (0, 2, 5)
            x = torch.randn(4, 8, device=ctx.device)
            if broken["now"]:
                ctx.raises(f, x)
            else:
                ctx.record(f(x))

    def test_backward_fails(self) -> None:
        def program(ctx: Context) -> None:
            f = ctx.compile(lambda x: (x * x).sin())

            def fail(grad: torch.Tensor) -> torch.Tensor:
                raise ArithmeticError("in a hook")

            for step in range(7):
                x = torch.randn(4, 8, device=ctx.device, requires_grad=True)
                y = f(x)
                if step in (1, 4):
                    y.register_hook(fail)
                    ctx.raises(y.sum().backward)
                else:
                    y.sum().backward()
                    ctx.record(x.grad)

        parity = self.parity(program, oracle=False)
        self.assertEqual(len(parity.errors), 2)
        self.assertError(parity.errors[0], "ArithmeticError", "in a hook")
        self.assertIn("BACKWARD", parity.tree.modes)

    @in_parity(oracle=False, recordings=1, errors=first_is("RuntimeError", "not tracked as outputs"))
    def test_tensor_that_is_kept_inside(ctx: Context) -> None:
        f = ctx.compile(lambda x: moody(x + 1).relu())
        MOOD["leak"] = True
        ctx.raises(f, torch.randn(4, 8, device=ctx.device))
        MOOD["leak"] = False
        LEAKED.clear()
        ctx.call(f)

    def test_operator_fails_while_it_is_captured(self) -> None:
        seen = compare_isolated("test_trees_failures", "fails_in_recording")
        self.assertEqual(len(seen["errors"]), 2)
        self.assertIn("the operator fails while it is captured", seen["errors"][0][1])

    def test_operator_waits_while_it_is_captured(self) -> None:
        seen = compare_isolated("test_trees_failures", "waits_while_captured")
        self.assertIn("captur", seen["errors"][0][1])

    def test_index_outside_of_a_table(self) -> None:
        seen = compare_isolated("test_trees_failures", "asserts_on_the_device")
        self.assertIn("device-side assert", seen["errors"][0][1])
        self.assertIsNotNone(seen["lost"])

    def test_out_of_memory_on_another_branch(self) -> None:
        seen = compare_isolated("test_trees_failures", "runs_out_of_memory_on_another_branch")
        self.assertEqual(seen["errors"][0][0], "torch.OutOfMemoryError")
        self.assertGreaterEqual(len(seen["errors"]), 2)


if __name__ == "__main__":
    run_tests()
