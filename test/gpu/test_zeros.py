"""Tangents that are zeros without memory, expanded or missing: gradients are those of un-graphed code in each call.

No test here sets saved-tensor hooks: after a process has set them, each call checks its inputs and replaces such zeros.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from indirection import Facts, IndirectionTestCase
from torch.testing._internal.common_utils import instantiate_parametrized_tests, parametrize, run_tests

CALLS = 9
TAKES: dict[str, Callable[[int], bool]] = {  # the calls with such a tangent
    "first": lambda call: call == 0,
    "while recording": lambda call: call in (1, 2),
    "later": lambda call: call > 4,
    "in turn": lambda call: call % 2 == 1,
    "always": lambda call: True,
}


def two(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return (x * w).sin(), (x + w).exp()


def zeros(like: torch.Tensor) -> torch.Tensor:
    return torch._efficientzerotensor(like.shape, dtype=like.dtype, device=like.device)


TANGENTS: dict[str, Callable[[torch.Tensor], torch.Tensor | None]] = {
    "zeros": zeros,
    "expanded": lambda like: torch.zeros((), device=like.device).expand_as(like),
    "none": lambda like: None,
}


def product(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x @ w, (x * 2).sum(0)


@instantiate_parametrized_tests
class TestZeros(IndirectionTestCase):
    def check(
        self,
        backward: Callable[[int, tuple[torch.Tensor, ...]], None],
        fn: Callable[..., Any] = two,
        shape: tuple[int, ...] = (2, 128),
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """Compares gradients of ``fn``; ``backward`` is given a call's number and outputs."""
        graphed = torch.compile(fn, mode="reduce-overhead")
        for call in range(CALLS):
            given = [torch.randn(shape, device=self.device, dtype=dtype) for _ in range(2)]
            results = []
            for way in (fn, graphed):
                leaves = [tensor.clone().requires_grad_() for tensor in given]
                backward(call, way(*leaves))
                results.append([leaf.grad.clone() for leaf in leaves])  # eager's may be such zeros
            torch.cuda.synchronize()
            self.assertEqual(results[1], results[0], msg=f"call {call}")
        self.assertGreater(Facts.now().replays, 0)

    @parametrize(
        "kind,takes",
        [("zeros", takes) for takes in TAKES]
        + [(kind, takes) for kind in ("expanded", "none") for takes in ("first", "later", "in turn")],
    )
    def test_of_an_output(self, kind: str, takes: str) -> None:
        def backward(call: int, outputs: tuple[torch.Tensor, ...]) -> None:
            one, other = outputs
            tangent = TANGENTS[kind](one) if TAKES[takes](call) else torch.full_like(one, 0.5)
            given = [(other, torch.ones_like(other)), *([(one, tangent)] if tangent is not None else [])]
            torch.autograd.backward([output for output, _ in given], [tangent for _, tangent in given])

        self.check(backward)

    def test_of_a_matrix_product(self) -> None:
        def backward(call: int, outputs: tuple[torch.Tensor, ...]) -> None:
            one, other = outputs
            tangent = zeros(one) if call % 3 else torch.full_like(one, 0.5)
            torch.autograd.backward([one, other], [tangent, torch.ones_like(other)])

        self.check(backward, product, (16, 16), torch.float64)

    @parametrize("takes", list(TAKES))
    def test_a_slice(self, takes: str) -> None:
        """Such a view has its offset as its address."""

        def backward(call: int, outputs: tuple[torch.Tensor, ...]) -> None:
            both = torch.cat(outputs)
            torch.autograd.backward(both, zeros(both) if TAKES[takes](call) else torch.full_like(both, 0.5))

        self.check(backward)

    def test_a_backward_that_is_recorded_again(self) -> None:
        def fn(f: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
            return f[..., g]

        graphed = torch.compile(fn, mode="reduce-overhead")
        f = torch.randn(2, 2, device=self.device, dtype=torch.float16)
        g = torch.tensor([1, 0], device=self.device)
        for call in range(6):
            results = []
            for way in (fn, graphed):
                leaf = f.clone().requires_grad_()
                out = way(leaf, g)
                tangent = zeros(out) if call > 1 else torch.full_like(out, 0.5)
                results.append(torch.autograd.grad(out, leaf, tangent)[0].clone())
            torch.cuda.synchronize()
            self.assertEqual(results[1], results[0], msg=f"call {call}")


if __name__ == "__main__":
    run_tests()
