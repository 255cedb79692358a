"""Facts about arithmetic: what a node computes, in which type, and where the GPU's compiler rounds differently.

Each function takes an ``fx.Node`` with its value under "val" and changes nothing. :func:`computes_in_double` says
whether the GPU can have the CPU's single-precision result; ``moves.py`` asks the other functions where to round.
Operators are listed by name. For an operator that no list contains, the answer is no.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from .nodes import HALVES, aten, is_constructor, prims, tensors_given, tensors_of

# The CPU computes in single precision with these types, and converts them to it first.
SINGLE = frozenset({torch.float32, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool})
# IEEE 754 defines the result to the bit for single precision, if the GPU computes in double precision and rounds.
COMPUTES = frozenset(
    {
        aten.add, aten.sub, aten.mul, aten.div, aten.reciprocal, aten.square, aten.fmod, aten.clamp,
        aten.clamp_min, aten.clamp_max, aten.ceil, aten.floor, aten.trunc, aten.round, aten.sign, aten.copysign,
    }
)  # fmt: skip
# In double precision these have an error of their own, which may reach the last place of the CPU's single-precision
# result. Measured: other functions differ by more, because the CPU's are less accurate. IEEE 754 defines a square root
# to the bit, but the CPU takes it from MKL, which does not follow it.
COMPUTES_NEARLY = frozenset(
    {
        aten.sqrt, aten.rsqrt, aten.pow, aten.exp, aten.exp2, aten.expm1, aten.log, aten.log2, aten.log10, aten.log1p,
        aten.sin, aten.cos, aten.tan, aten.tanh, aten.asin, aten.acos, aten.atan, aten.atan2, aten.erf, aten.erfc,
    }
)  # fmt: skip
_CLAMPS = frozenset({aten.clamp, aten.clamp_min, aten.clamp_max})
CONVERSIONS = frozenset({aten._to_copy, prims.convert_element_type})  # possibly to another device as well
# These convert their scalars to the type of their tensors.
_TAKE_NUMBERS = frozenset(
    {
        aten.full, aten.full_like, aten.new_full, aten.scalar_tensor, aten.masked_fill, aten.where,
        aten.constant_pad_nd, aten.eq, aten.ne, aten.lt, aten.le, aten.gt, aten.ge,
    }
)  # fmt: skip
_CHOOSES = frozenset({aten.minimum, aten.maximum})
_JOINS = frozenset({aten.cat, aten.stack})


def computes_in_double(node: fx.Node) -> bool:
    """Whether the GPU finds the CPU's single-precision result if it computes in double precision and rounds."""
    target: Any = node.target
    if not isinstance(target, torch._ops.OpOverload) or target.overloadpacket not in COMPUTES | COMPUTES_NEARLY:
        return False
    if "rounding_mode" in node.kwargs or node.kwargs.get("alpha", 1) != 1 or node.kwargs.get("decimals"):
        return False
    if target.overloadpacket in _CLAMPS and not _clamps_beside_zero(node):
        return False
    for arg in pytree.tree_leaves((node.args, node.kwargs)):
        if isinstance(arg, fx.Node):
            if isinstance(arg.meta.get("val"), (torch.SymFloat, torch.SymInt)):
                return False  # the CPU first converts the number to single precision
        elif not (arg is None or isinstance(arg, float) or (isinstance(arg, int) and abs(arg) <= 1 << 24)):
            return False
    return {t.dtype for t in tensors_of(node)} == {torch.float32} and {t.dtype for t in tensors_given(node)} <= SINGLE


def _clamps_beside_zero(node: fx.Node) -> bool:
    """Whether no bound is zero in single precision: then CPU and GPU may return zeros with different signs."""
    bounds = [bound for bound in (*node.args[1:], *node.kwargs.values()) if bound is not None]
    return all(isinstance(bound, (int, float)) and bool(torch.tensor(bound, dtype=torch.float32)) for bound in bounds)


def is_conversion(node: fx.Node) -> bool:
    """Whether the node gives its input's elements in another type."""
    target: Any = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return False
    return target.overloadpacket in CONVERSIONS and [t.dtype for t in tensors_given(node)] != [
        t.dtype for t in tensors_of(node)
    ]


def is_negation(node: fx.Node) -> bool:
    """Whether the node negates floating-point numbers: a GPU's compiler makes that ``0 - x``, which loses -0.0."""
    return node.target is aten.neg.default and node.meta["val"].is_floating_point()


def is_inverse_root(node: fx.Node) -> bool:
    """Whether the node is a power that a CPU computes as one over a square root, with other zeros and infinities."""
    return node.target is aten.pow.Tensor_Scalar and node.args[1] == -0.5


def rounds_numbers_to(node: fx.Node) -> torch.dtype | None:
    """The type to which the node converts given numbers, if a kernel would use them unrounded; None otherwise."""
    target: Any = node.target
    if not isinstance(target, torch._ops.OpOverload) or target.overloadpacket not in _TAKE_NUMBERS:
        return None
    types = {tensor.dtype for tensor in [*tensors_given(node), *tensors_of(node)] if tensor.is_floating_point()}
    return types.pop() if len(types) == 1 and types <= HALVES | {torch.float32} else None


def mixes_with_half(node: fx.Node) -> bool:
    """Whether the node gives half-precision numbers and takes single-precision numbers or integers.

    On the GPU such a number is used unrounded in place of an element; the CPU rounds it when it stores the result.
    """
    target: Any = node.target
    value = node.meta["val"]
    if not isinstance(value, torch.Tensor) or value.dtype not in HALVES or is_constructor(node):
        return False
    if not isinstance(target, torch._ops.OpOverload):
        return False
    if target.overloadpacket in _JOINS:  # their numbers are dimensions
        return any(tensor.dtype != value.dtype for tensor in tensors_given(node))
    if target.overloadpacket not in _TAKE_NUMBERS | _CHOOSES:
        return False
    numbers = [
        arg.meta["val"] if isinstance(arg, fx.Node) else arg for arg in pytree.tree_leaves((node.args, node.kwargs))
    ]
    return any(
        number.dtype not in (value.dtype, torch.bool)
        if isinstance(number, torch.Tensor)
        else isinstance(number, (int, torch.SymInt, torch.SymFloat)) and not isinstance(number, bool)
        for number in numbers
    )


def terms_of(node: fx.Node, args: Sequence[Any]) -> tuple[Any, Any] | None:
    """The dividend and the divisor among the arguments; None if the node is no quotient."""
    target: Any = node.target
    return (args[0], args[1]) if target.overloadpacket is aten.div else None


def factors_of(node: fx.Node, args: Sequence[Any]) -> tuple[Any, Any] | None:
    """The factors among the arguments; None if the node is no product."""
    target: Any = node.target
    if target.overloadpacket is aten.mul:
        return args[0], args[1]
    if target.overloadpacket is aten.square or (target is aten.pow.Tensor_Scalar and args[1] == 2):
        return args[0], args[0]
    return None
