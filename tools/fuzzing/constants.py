"""Values that a program computes on the CPU from numbers alone, and moves to the device of an input.

They must equal eager's bit for bit, in every dtype; :func:`~fuzzing.case.constants_of` finds them in a program.
:func:`begin` and :func:`continued` draw the lines of a chain: a constructor, and operators on it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .scope import Scope

FLOATS = ("float64", "float32", "bfloat16", "float16")
INTEGERS = ("int64", "int32", "int16", "int8", "uint8")
DTYPES = (*FLOATS, *INTEGERS, "bool", "complex64")

_LITERALS = {
    "float": "[1.5, -0.0, 0.0, float('inf'), -float('inf'), float('nan'), -7.75, 3e9]",
    "complex": "[1.5 - 2j, 0j, -1j, 3 + 4j]",
    "bool": "[True, False, True]",
    "int": "[3, 0, 1, 100, 7]",
}


def begin(s: Scope) -> str:
    """Draws a constructor."""
    dtype = s.one_of(*DTYPES)
    count, rows = s.one_of(1, 3, 7, 16, 33, 100), s.one_of(1, 2, 5)
    of = f"dtype=torch.{dtype}"
    kind = "float" if dtype in FLOATS else "complex" if dtype == "complex64" else "bool" if dtype == "bool" else "int"
    value = {"float": "-2.7", "complex": "1.5 - 0.5j", "bool": "True", "int": "5"}[kind]
    forms = [
        f"torch.full(({rows}, {count}), {value}, {of})",
        f"torch.eye({rows}, {count}, {of})",
        f"torch.{s.one_of('zeros', 'ones')}({count}, {of})",
        f"torch.tensor({_LITERALS[kind]}, {of})",
    ]
    if dtype not in ("bool", "complex64"):
        forms += [f"torch.arange({count}, {of})", f"torch.arange({count}, {of}) * 3 - {s.one_of(0, 7, 50)}"]
    if kind == "float":
        # If steps are rounded, eager's linspace depends on the CPU, and torch.compile computes it in another way.
        forms += [
            f"torch.linspace(-3, {count / 4 - 3.25}, {count}, {of})",
            f"torch.arange(-{count}, {count}, 0.25, {of})",
        ]
    return s.one_of(*forms)


def continued(s: Scope, name: str) -> str:
    """Draws an operator on an earlier value of the chain; some do not fit every dtype."""
    family = s.one_of("arithmetic", "function", "rounding", "comparison", "extremes", "cast", "product", "other")
    ones = "({0} > 1).to(torch.float32)"  # the last place of other sums may differ from eager, with torch.compile, too
    forms = {
        "arithmetic": ("{0} + 3", "{0} * 0.1", "{0} / 61", "{0} - 7", "1 / {0}", "{0} // 3", "{0} % 5", "-{0}"),
        "function": ("{0} ** 2", "{0}.pow(-0.5)", "{0}.exp()", "{0}.log()", "{0}.sqrt()", "{0}.sin()", "{0}.tanh()"),
        "rounding": ("{0}.floor()", "{0}.trunc()", "{0}.round()", "{0}.abs()"),
        "comparison": ("{0} > 2", "{0} == 0", "{0} <= -{0}", "{0} != {0}"),
        "extremes": ("torch.minimum({0}, -{0})", "torch.maximum({0}, -{0})", "{0}.clamp(-0.0, 3)", "{0}.clamp(max=2)"),
        "cast": tuple(f"{{0}}.to(torch.{dtype})" for dtype in DTYPES),
        "product": ("{0}.reshape(-1, 1) @ {0}.reshape(1, -1)", f"{ones}.reshape(1, -1) @ {ones}.reshape(-1, 1)"),
        "other": ("{0}.cumsum(-1)", "torch.where({0} > 1, {0}, {0} * 2)", "{0}.flip(0)", "{0}.sum(-1, keepdim=True)"),
    }
    return s.one_of(*forms[family]).format(name)


def combination(moved: str, dtype: str, x: object) -> str:
    """An operand ``x`` combined with a moved constant, within a few units for any constant."""
    if dtype == "bool":
        return f"torch.where({moved}, {x}, {x} * 0.5)"
    if dtype in INTEGERS:
        return f"({moved}.to(torch.int64) % 7 - 3).to({x}.dtype) * 0.25 * {x}"
    real = f"{moved}.abs()" if dtype.startswith("complex") else moved
    return f"torch.nan_to_num({real}.to({x}.dtype), 0.5, 1.0, -1.0).clamp(-1, 1) * {x}"
