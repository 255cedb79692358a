"""Floating-point functions that the GPU may compute in place of the CPU, and how close the results are."""

from __future__ import annotations

from collections.abc import Callable

import torch

COUNT = 1 << 14
Function = Callable[[torch.Tensor], torch.Tensor]

# Bit for bit the CPU's result.
EQUAL: dict[str, Function] = {
    "negated": lambda v: torch.copysign(torch.ones(COUNT), -v),  # also the sign of a zero
    "ceiling": torch.ceil,
    "floor": torch.floor,
    "truncated": torch.trunc,
    "rounded": torch.round,
    "sign": torch.sign,
    "remainder": lambda v: v.fmod(0.3),
    # Inductor drops conversions to a type and back, on the CPU as well.
    "of half precision": lambda v: v.half().flip(0).float(),
    "of brain's": lambda v: v.bfloat16().flip(0).float(),
    "compared in half precision": lambda v: (v.half() > 0.1).float(),
    "compared in brain's": lambda v: (v.bfloat16() >= 0.1).float(),
    "of double precision, halved": lambda v: v.double().half().flip(0).float(),
}
# Rounded as the GPU's compiler rounds.
NEAR: dict[str, Function] = {
    "plus": lambda v: v + 0.1,
    "minus": lambda v: v - v.flip(0),
    "times": lambda v: v * 0.1,
    "times and plus": lambda v: v * 0.1 + 0.3,
    "over": lambda v: v / 3,
    "over itself": lambda v: v / v.flip(0),
    "reciprocal": torch.reciprocal,
    "square": torch.square,
    "clamp": lambda v: v.clamp(-0.1, 0.1),
    "alpha": lambda v: torch.add(v, v, alpha=0.3),
    "of integers": lambda v: torch.arange(COUNT) * 0.1 + v,
    "of booleans": lambda v: (v > 0) * 0.1,
    "several": lambda v: (v * v + v.abs()) / (v.abs() + 1e-5),
    "square root": lambda v: (v * v + 1).sqrt(),
    "reciprocal square root": lambda v: (v.abs() + 1e-6).rsqrt(),
    "power": lambda v: v.abs() ** 0.3,
    "power of a number": lambda v: 10000.0 ** v.clamp(-5, 5),
    "exponential": torch.exp,
    "of two": torch.exp2,
    "less one": torch.expm1,
    "logarithm": lambda v: v.abs().log(),
    "of base 2": lambda v: v.abs().log2(),
    "of base 10": lambda v: v.abs().log10(),
    "of one more": lambda v: v.abs().log1p(),
    "sine": torch.sin,
    "cosine": torch.cos,
    "tangent": torch.tan,
    "hyperbolic tangent": torch.tanh,
    "arcsine": lambda v: v.clamp(-1, 1).asin(),
    "arccosine": lambda v: v.clamp(-1, 1).acos(),
    "arctangent": torch.atan,
    "of two numbers": lambda v: torch.atan2(v, v.flip(0)),
    "error function": torch.erf,
    "its complement": torch.erfc,
    "computed before": lambda v: (v * 2 + 1).exp().view(2, -1).t().reshape(-1),
}
# Left to the CPU: nothing is known about the operator, or the last place may decide about more.
STAYS: dict[str, Function] = {
    "computed with": lambda v: v.sin() + 1,
    "compared": lambda v: (v.exp() > 1.0).float(),
    "compared after a product": lambda v: (v * 0.1 > 1.0).float(),
    "floor of a product": lambda v: (v * 0.1).floor(),
    "root": lambda v: v**-0.5,  # the CPU computes it as `rsqrt`, with other zeros and infinities
    "double precision": lambda v: v.double() * 0.1,
    "half precision": lambda v: v.bfloat16() * 0.1,
    "rectified": torch.relu,  # of the two zeros, the CPU returns -0.0
    "clamped at zero": lambda v: v.clamp(min=0),
    # A fused product makes a difference that is zero on the CPU negative.
    "square root of a difference": lambda v: (v.flip(0) - v * v).sqrt(),
    "logarithm of a difference": lambda v: (v * v * 0.3 + v).log(),
    "arccosine of a quotient": lambda v: (v / v.flip(0)).acos(),
    "bits": lambda v: (v * 0.1).view(torch.int32),
    "maximum": lambda v: torch.maximum(v, v.flip(0)),
    "minimum": lambda v: torch.minimum(v, torch.tensor(0.0)),
    "largest": lambda v: v.view(2, -1).amax(0),
    "sigmoid": torch.sigmoid,
    "a sum": lambda v: v.cumsum(0),
    "an integer of it": lambda v: v.long(),
    "floored quotient": lambda v: torch.div(v, 0.3, rounding_mode="floor"),
}


def numbers() -> torch.Tensor:
    """Large, small and medium numbers of both signs, and both zeros, never adjacent nor opposite."""
    draw = torch.Generator().manual_seed(0)
    quarter = COUNT // 4
    return torch.cat(
        [
            torch.linspace(-20, 20, quarter),
            torch.randn(quarter, generator=draw),
            torch.randn(quarter, generator=draw) * 1e-4,
            torch.exp(torch.randn(quarter - 2, generator=draw) * 10),
            torch.tensor([0.0, -0.0]),
        ]
    )[torch.randperm(COUNT, generator=draw)]
