"""The derivative of sea water's dynamic enthalpy by temperature, in float64: an ocean model's source of buoyancy.

Follows the 48-term expression for specific volume of the TEOS-10 manual (IOC, SCOR and IAPSO 2010, appendix K), as the
kernel of this name in pyhpc-benchmarks does; the arithmetic is our own. Three inputs of 1048576 random elements
(256x256x16), one output, one pointwise kernel. There are no weights and no autocast. README.md derives the formula.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from typing import Any

import torch

from .registry import Made, workload

PASCAL_PER_DBAR = 1e4
SHAPE = (256, 256, 16)

Quantity = Any  # a tensor, or a number if it is the same everywhere
Pair = tuple[Quantity, Quantity]  # a quantity and its derivative by temperature

# Coefficients in ascending powers of t; names tell what they multiply: "s", "r" for s * sqrt(s), "p", "p2" and so on.
DENOMINATOR = {
    "1": (9.998420897506056e2, 2.839940833161907e0, -3.147759265588511e-2, 1.181805545074306e-3),
    "s": (-6.698001071123802e0, -2.986498947203215e-2, 2.327859407479162e-4),
    "r": (-3.988822378968490e-2, 5.095422573880500e-4, -1.426984671633621e-5, 1.645039373682922e-7),
    "p": (-2.233269627352527e-2, -3.436090079851880e-4, 3.726050720345733e-6),
    "sp": (-1.806789763745328e-4, 6.876837219536232e-7),
    "p2": (-3.087032500374211e-7, -1.988366587925593e-8, -1.061519070296458e-11),
    "sp2": (1.550932729220080e-10,),
}
NUMERATOR = {
    "1": (1.0, 2.775927747785646e-3, -2.349607444135925e-5, 1.119513357486743e-6, 6.743689325042773e-10),
    "s": (
        -7.521448093615448e-3,
        -2.764306979894411e-5,
        1.262937315098546e-7,
        9.527875081696435e-10,
        -1.811147201949891e-11,
    ),
    "r": (
        -3.303308871386421e-5,
        3.801564588876298e-7,
        -7.672876869259043e-9,
        -4.634182341116144e-11,
        2.681097235569143e-12,
    ),
    "s2": (5.419326551148740e-6,),
    "p": (-2.742185394906099e-5, -3.212746477974189e-7, 3.191413910561627e-9, -1.931012931541776e-12),
    "sp": (-1.105097577149576e-7, 6.211426728363857e-10),
    "p2": (-1.119011592875110e-10, -1.941660213148725e-11, -1.864826425365600e-14),
    "sp2": (0.0, 1.119522344879478e-14),
    "p3": (-1.200507748551599e-15, 6.057902487546866e-17),
}


def polynomial(t: torch.Tensor, coefficients: Sequence[float]) -> Pair:
    """A polynomial in t and its derivative."""
    value: Quantity = coefficients[-1]
    slope: Quantity = 0.0
    for n, coefficient in enumerate(reversed(coefficients[:-1])):
        slope = slope * t + value if n else value
        value = value * t + coefficient
    return value, slope


def _sum(*terms: Pair) -> Pair:
    return functools.reduce(operator.add, (v for v, _ in terms)), functools.reduce(operator.add, (d for _, d in terms))


def _times(x: Pair, y: Pair) -> Pair:
    return x[0] * y[0], x[1] * y[0] + x[0] * y[1]


def _scaled(x: Pair, factor: torch.Tensor | float) -> Pair:
    return x[0] * factor, x[1] * factor


def _over(x: Pair, y: Pair) -> Pair:
    quotient = x[0] / y[0]
    return quotient, (x[1] - quotient * y[1]) / y[0]


def _minus(x: Pair, y: Pair) -> Pair:
    return x[0] - y[0], x[1] - y[1]


def _sqrt(x: Pair) -> Pair:
    root = torch.sqrt(x[0])
    return root, 0.5 * x[1] / root


def _log(x: Pair) -> Pair:
    return torch.log(x[0]), x[1] / x[0]


def volume_terms(s: torch.Tensor, t: torch.Tensor) -> tuple[list[Pair], list[Pair]]:
    """Coefficients of N and D in ascending powers of p, with their derivatives by t."""
    root = torch.sqrt(s)
    n = {name: polynomial(t, terms) for name, terms in NUMERATOR.items()}
    d = {name: polynomial(t, terms) for name, terms in DENOMINATOR.items()}
    numerator = [
        _sum(n["1"], _scaled(n["s"], s), _scaled(n["r"], s * root), _scaled(n["s2"], s * s)),
        _sum(n["p"], _scaled(n["sp"], s)),
        _sum(n["p2"], _scaled(n["sp2"], s)),
        n["p3"],
    ]
    denominator = [
        _sum(d["1"], _scaled(d["s"], s), _scaled(d["r"], s * root)),
        _sum(d["p"], _scaled(d["sp"], s)),
        _sum(d["p2"], _scaled(d["sp2"], s)),
    ]
    return numerator, denominator


def enthalpy_by_temperature(s: torch.Tensor, t: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    """Derivative of dynamic enthalpy by conservative temperature [J/(kg K)]."""
    (a0, a1, a2, a3), (b0, twice_b1, b2) = volume_terms(s, t)
    b1 = _scaled(twice_b1, 0.5)
    # N / D is a line in p plus (r1 p + r0) / D.
    q1 = _over(a3, b2)
    q0 = _over(_minus(a2, _times(twice_b1, q1)), b2)
    r1 = _minus(_minus(a1, _times(b0, q1)), _times(twice_b1, q0))
    r0 = _minus(a0, _times(b0, q0))
    # D = (b2 p + low) (b2 p + high) / b2.
    half_width = _sqrt(_minus(_times(b1, b1), _times(b0, b2)))
    low, high = _minus(b1, half_width), _sum(b1, half_width)
    b2p = _scaled(b2, p)
    along_low = _log(_over(_sum(b2p, low), low))
    along_high = _log(_over(_sum(b2p, high), high))
    straight = _sum(_scaled(q1, 0.5 * p * p), _scaled(q0, p))
    # The integral of 1 / D is (along_low - along_high) / (2 half_width), that of D' / D is along_low + along_high.
    slanted = _over(_times(r1, _sum(along_low, along_high)), _scaled(b2, 2.0))
    rest = _minus(r0, _over(_times(r1, b1), b2))
    level = _over(_times(rest, _minus(along_low, along_high)), _scaled(half_width, 2.0))
    return _sum(straight, slanted, level)[1] * PASCAL_PER_DBAR


@workload("EOS", mode="inference", batch=1048576, autocast=False)
def build(*, shape: tuple[int, int, int] = SHAPE) -> Made:
    """Equation of state of sea water, float64, 1048576 points"""
    s = torch.rand(shape, dtype=torch.float64) * 35 + 5
    t = torch.rand(shape, dtype=torch.float64) * 30 - 2
    p = torch.rand(shape, dtype=torch.float64) * 4000 + 1
    return enthalpy_by_temperature, (s, t, p)
