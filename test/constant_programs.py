"""Values that programs compute from constants alone, by family; each must have the bits that the CPU computes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

INF, NAN = float("inf"), float("nan")


@dataclass(frozen=True)
class Constant:
    """A value of a program; ``value`` makes it on the CPU, from the program's size ``n`` if it depends on that."""

    family: str
    name: str
    value: Callable[[int], torch.Tensor]
    static: str = "folded"  # "made", "folded" or "copied" if n is known
    dynamic: str = "copied"  # the same if n is not known
    eager: bool = True  # whether Inductor's code for the CPU, which computes copied values, has eager's bits


def count(n: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    return torch.arange(n, dtype=dtype)


def column_and_row(n: int, dtype: torch.dtype | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    return (count(n) % 7).to(dtype or torch.int64)[:, None], (count(n) % 5).to(dtype or torch.int64)[None]


def square(n: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    column, row = column_and_row(n, dtype)
    return column + row


def _product(n: int) -> torch.Tensor:
    return square(n) @ square(n)


def _outer(n: int) -> torch.Tensor:
    column, row = column_and_row(n)
    return column @ row


def _wide(n: int) -> torch.Tensor:
    """Infinities, NaN, both zeros, and numbers beyond all integers."""
    return torch.stack([count(n) * 3e38, -count(n) * 1e30, 0.0 / count(n), -count(n) * 0.25, count(n) / 3])


NO_KERNEL = [
    Constant("no kernel", "matrix product", _product),
    Constant("no kernel", "outer product", _outer),
    Constant("no kernel", "batch", lambda n: torch.bmm(square(n)[None], square(n)[None])),
    Constant("no kernel", "product and sum", lambda n: torch.addmm(count(n), square(n), square(n), alpha=2)),
    Constant("no kernel", "vector", lambda n: square(n) @ count(n), "folded", "made"),  # a sum of products
    Constant("no kernel", "einsum", lambda n: torch.einsum("ij,jk->ik", square(n), square(n))),
    Constant("no kernel", "int32", lambda n: square(n, torch.int32) @ square(n, torch.int32)),
    Constant("no kernel", "int16", lambda n: square(n, torch.int16) @ square(n, torch.int16)),
    Constant("no kernel", "uint8", lambda n: square(n, torch.uint8) @ square(n, torch.uint8)),
    Constant("no kernel", "int8", lambda n: square(n, torch.int8) @ square(n, torch.int8)),
    Constant("no kernel", "running product", lambda n: (count(n) % 3 + 1).cumprod(0), "folded", "made"),
]
ROUNDED = [
    Constant("rounded", "truncated quotient", lambda n: (count(n) / 61).long()),
    Constant("rounded", "truncated product", lambda n: (count(n) * 0.1).int(), "folded", "copied"),
    Constant("rounded", "floored", lambda n: (count(n) / 7).floor().long()),
    Constant("rounded", "root", lambda n: (count(n) + 0.5).sqrt(), eager=False),
    Constant("rounded", "quotient by six", lambda n: count(n) * 1e-45 / 6),
    Constant("rounded", "exponential", lambda n: (count(n) / 9).exp(), eager=False),
    Constant("rounded", "sines", lambda n: torch.outer(count(n).float(), 10000 ** (-count(8) / 8)).sin(), eager=False),
    Constant("rounded", "power", lambda n: (count(n) + 1).float().pow(-0.5), eager=False),
    Constant("rounded", "sum", lambda n: (count(n) / 3).sum(), eager=False),
    Constant("rounded", "running sum", lambda n: (count(n) / 3).cumsum(0)),
    Constant("rounded", "matrix product", lambda n: square(n).float() @ (square(n) / 3)),
    Constant("rounded", "double precision", lambda n: count(n).double() / 3),
    Constant("rounded", "half", lambda n: count(n).half() * 0.1 + 0.3, eager=False),
    Constant("rounded", "bfloat16", lambda n: (count(n).bfloat16() / 3 - 1) * 0.7, eager=False),
    Constant("rounded", "to half", lambda n: count(n).half(), "made", "made"),
    Constant("rounded", "half to integers", lambda n: (count(n).half() * 0.7).long(), eager=False),
]
ODD = [
    Constant("odd", "infinities to integers", lambda n: (_wide(n)).long()),
    Constant("odd", "to int32", lambda n: (_wide(n)).int()),
    Constant("odd", "to booleans", lambda n: (_wide(n)).bool()),
    Constant("odd", "maximum", lambda n: torch.maximum(-count(n) * 0.0, (count(n) % 2) * 0.0), eager=False),
    Constant("odd", "minimum", lambda n: torch.minimum((count(n) % 2) * 0.0, -count(n) * 0.0), eager=False),
    Constant("odd", "largest of rows", lambda n: _wide(n)[2:].amax(0), eager=False),
    Constant("odd", "clamped at zero", lambda n: (-count(n) * 0.25).clamp(min=0), eager=False),
    Constant("odd", "rectified", lambda n: (-count(n) * 0.0).relu(), eager=False),
    Constant("odd", "minus zero", lambda n: torch.where(count(n) % 2 == 0, -0.0, 1.0), "folded", "folded"),
    # The GPU's number is rounded to half precision first, to minus zero.
    Constant("odd", "padded", lambda n: F.pad(count(n).half(), (1, 1), value=-1e-9)),
    Constant("odd", "negated", lambda n: -(count(n) % 2).float(), "made", "made"),
]
INTEGERS = [
    Constant("integers", "positions", lambda n: count(n)[:, None] - count(n), "made", "made"),
    Constant("integers", "mask", lambda n: (count(n)[:, None] >= count(n)).logical_not(), "made", "made"),
    Constant("integers", "buckets", lambda n: (count(n) // 3).clamp(max=7) % 5, "made", "made"),
    Constant("integers", "sum", lambda n: (count(n) * 3).sum(), "folded", "made"),
    Constant("integers", "sorted", lambda n: (count(n) * 7 % 5).sort(stable=True).indices),
    Constant("integers", "looked up", lambda n: (count(n) * 3)[count(n).flip(0)]),
]
FAMILIES = [*NO_KERNEL, *ROUNDED, *ODD, *INTEGERS]


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors have the same type, sizes and bits; NaNs are equal."""
    one, other = one.detach().cpu(), other.detach().cpu()
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    if one.is_complex():
        one, other = torch.view_as_real(one.resolve_conj()), torch.view_as_real(other.resolve_conj())
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[one.element_size()]
    equal = one.contiguous().view(bits) == other.contiguous().view(bits)
    if one.is_floating_point():
        equal |= one.isnan() & other.isnan()
    return bool(equal.all())
