"""Whether a node's operator can run again or on the GPU, and how close the result is there.

Each function takes an ``fx.Node`` with its value under "val" and changes nothing. A function named ``why_not_…``
returns the reason as text, or None. Operators are listed by name. An operator that no list contains counts as one that
may give another result on the GPU.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from enum import Enum, IntEnum
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from .lookups import LOOKUPS, is_by_integers
from .nodes import (
    HALVES,
    REARRANGES,
    aten,
    is_integral,
    is_on_gpu,
    is_view,
    prims,
    reached,
    tensors_given,
    tensors_of,
)

# The result consists of elements of the inputs, or of given numbers. It is the same on every device, for every type.
_MOVES_ELEMENTS = REARRANGES | frozenset(
    {
        aten.full, aten.zeros, aten.ones, aten.scalar_tensor, aten.full_like, aten.zeros_like, aten.ones_like,
        aten.new_full, aten.new_zeros, aten.new_ones, aten.eye, aten.tril_indices, aten.triu_indices,
        aten.view, aten.split, aten.split_with_sizes, aten.unbind, aten.diagonal,
        aten.unfold, aten.roll, aten.cat, aten.stack, aten.tril, aten.triu,
        aten.index, aten.index_select, aten.gather, aten.embedding, aten.where, aten.masked_fill,
        aten.constant_pad_nd, aten.select_scatter, aten.slice_scatter, aten.diagonal_scatter, aten.neg, aten.abs,
        aten.empty, aten.empty_strided, aten.empty_permuted, aten.empty_like, aten.new_empty, prims.view_of, prims.rev,
    }
)  # fmt: skip
_COMPARES = frozenset(
    {
        aten.eq, aten.ne, aten.lt, aten.le, aten.gt, aten.ge, aten.isnan, aten.isinf, aten.logical_not,
        aten.logical_and, aten.logical_or, aten.logical_xor,
    }
)  # fmt: skip
_CONVERTS = frozenset({aten._to_copy, prims.convert_element_type})  # possibly to another device as well
# Integers at equal distances, from a first one on.
_COUNTS = frozenset({aten.arange, prims.iota})
_DIVIDES = frozenset({aten.div, aten.floor_divide, aten.remainder, aten.fmod})
# For integers only: a floating-point sum depends on its order, and devices choose different ones of two zeros.
_REDUCES = frozenset(
    {
        aten.sum, aten.prod, aten.cumsum, aten.cumprod, aten.max, aten.min, aten.amax, aten.amin, aten.argmax,
        aten.argmin, aten.all, aten.any,
    }
)  # fmt: skip
_COMPUTES_INTEGERS = _COUNTS | _DIVIDES | _REDUCES | {
    aten.add, aten.sub, aten.mul, aten.square, aten.relu, aten.clamp, aten.clamp_min, aten.clamp_max, aten.sign,
    aten.minimum, aten.maximum, aten.bitwise_and, aten.bitwise_or, aten.bitwise_xor, aten.bitwise_not,
}  # fmt: skip
# Single precision. Devices round each result alike, but a compiler may fuse a product and a sum, which rounds once, or
# divide approximately.
_CLAMPS = frozenset({aten.clamp, aten.clamp_min, aten.clamp_max})
_ARITHMETIC = _CLAMPS | {aten.add, aten.sub, aten.mul, aten.div, aten.reciprocal, aten.square}
# Exact, but discontinuous: neighbouring inputs may have very different results.
_JUMPS = frozenset({aten.fmod, aten.ceil, aten.floor, aten.trunc, aten.round, aten.sign, aten.copysign})
_FUNCTIONS = frozenset(
    {
        aten.sqrt, aten.rsqrt, aten.pow, aten.exp, aten.exp2, aten.expm1, aten.log, aten.log2, aten.log10, aten.log1p,
        aten.sin, aten.cos, aten.tan, aten.tanh, aten.asin, aten.acos, aten.atan, aten.atan2, aten.erf, aten.erfc,
    }
)  # fmt: skip
# The CPU computes in single precision with these types, and converts them to it first.
_SINGLE = frozenset({torch.float32, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool})
_WHOLE = frozenset({torch.int64, torch.int32, torch.bool})
# Assumed if a number is known only at the call: it is a size or a position, and no program makes more elements on
# the CPU at each call. Torch itself assumes the same of the values that it moves.
_MOST_ELEMENTS, _MOST_SYMBOLIC = 1 << 24, 1 << 30


class Error(IntEnum):
    """How far a value that the GPU computes may be from the CPU's."""

    NONE = 0  # the same bits
    ROUNDING = 1  # of single-precision arithmetic
    FUNCTION = 2  # of a function such as `exp`


class Kind(Enum):
    """How an operator's result on the GPU compares with the CPU's.

    A kind has the error that it adds, the largest one in its inputs with which the result is known, and whether the
    operator computes floating-point numbers.
    """

    MOVES = Error.NONE, Error.FUNCTION, False  # elements of the inputs, or given numbers
    CONVERTS = Error.NONE, Error.ROUNDING, False  # the same fractions, or integers as fractions, in another type
    EXACT = Error.NONE, Error.NONE, False  # the same bits
    JUMPS = Error.NONE, Error.NONE, True  # the same bits for the same input, but discontinuous
    ROUNDS = Error.ROUNDING, Error.ROUNDING, True  # single-precision arithmetic, which may be rounded differently
    FUNCTION = Error.FUNCTION, Error.ROUNDING, True  # such as `exp`, for which devices have different algorithms


def why_not_the_same_again(node: fx.Node) -> str | None:
    """Says why a call cannot run again, or elsewhere, in place of the program's; None if it can."""
    target = node.target
    if node.op != "call_function":
        return f"it is a {node.op}"
    if not isinstance(target, torch._ops.OpOverload) or target.namespace not in ("aten", "prims"):
        return "it is a custom operator"
    if target._schema.is_mutable:
        return "it writes to a tensor"
    # Seeds, and values made from them.
    if torch.Tag.nondeterministic_seeded in target.tags or "inductor_" in str(target):
        return "it is random"
    if torch.Tag.data_dependent_output in target.tags or (
        torch.Tag.dynamic_output_shape in target.tags and not is_by_integers(node)
    ):
        return "its size or its result is a number that the CPU needs"
    if not tensors_of(node) or any(device.type != "cpu" for device in {t.device for t in tensors_of(node)}):
        return "its result does not lie on the CPU"
    if any(t.layout != torch.strided for t in tensors_of(node)):
        return "it is sparse"
    return None


def why_not_elsewhere(node: fx.Node, *, exact: bool) -> str | None:
    """Says why a call would give another result on another device; None if the result is the same.

    Args:
        exact: leave computations that round to the CPU.
    """
    if node.op == "call_function" and node.target is operator.getitem:
        return None
    if (why := why_not_the_same_again(node)) is not None:
        return why
    kind = kind_of(node)
    if kind is None:
        return "it may give something else on the GPU"
    numbers = (arg for arg in pytree.tree_leaves((node.args, node.kwargs)) if isinstance(arg, float))
    if any(number == 0 and math.copysign(1, number) < 0 for number in numbers):
        return "it is given -0.0, of which the GPU's compiler may make 0.0"
    if any(map(_is_fraction, node.all_input_nodes)):
        return "it is given a fraction of sizes, which a kernel computes in single precision"
    if any(map(_is_large, node.all_input_nodes)):
        return "it is given a large number made of sizes, which a kernel computes with 32 bits"
    if _may_divide_by_zero(node):
        return "it divides integers, and a division by zero is an error of the CPU's"
    if exact and kind.value[-1]:
        return "its result may differ in the last place"
    return None


def kind_of(node: fx.Node) -> Kind | None:
    """The kind of a node whose operator can run elsewhere; None if the GPU may give anything else.

    That holds for matrix products (other precisions, or none for integers), sums of floating-point numbers, choices
    among equal elements or among several writes to one place, and decompositions.
    """
    target: Any = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return Kind.MOVES  # one item of several
    packet, given, result = target.overloadpacket, tensors_given(node), tensors_of(node)
    types = {tensor.dtype for tensor in [*given, *result]}
    to_integers, of_integers = all(map(is_integral, result)), all(map(is_integral, given))
    # The absolute value of a complex number is a computation, and not every GPU has the other types.
    if not (types <= _SINGLE | HALVES | {torch.float64} and _numbers_fit(node)):
        return None
    if packet in _MOVES_ELEMENTS:
        # A kernel holds half precision in single precision, and a mask in one bit.
        reads_bits = target is aten.view.dtype and given[0].dtype in HALVES | {torch.bool}
        return None if reads_bits else Kind.MOVES
    if packet in _COMPARES:
        rounds_first = bool(types & HALVES) and len(types - {torch.bool}) > 1  # the CPU does, to half precision
        return None if rounds_first else Kind.EXACT
    if packet in _CONVERTS:
        if node.kwargs.get("memory_format") not in (None, torch.preserve_format):
            return None
        if to_integers and not of_integers:  # devices differ in numbers that do not fit
            return Kind.JUMPS if result[0].dtype == torch.bool else None
        return Kind.EXACT if to_integers else Kind.CONVERTS
    if to_integers and of_integers:
        # In a kernel, integers of fewer bits may have 32.
        return Kind.EXACT if packet in _COMPUTES_INTEGERS and types <= _WHOLE and _counts_alike(node) else None
    is_single = all(tensor.dtype == torch.float32 for tensor in result) and types <= _SINGLE
    return _single_kind(node) if is_single else None


def _single_kind(node: fx.Node) -> Kind | None:
    """The kind of a node that gives single-precision numbers."""
    target: Any = node.target
    packet = target.overloadpacket
    if "rounding_mode" in node.kwargs or node.kwargs.get("decimals"):
        return None
    if target is aten.pow.Tensor_Scalar and node.args[1] in (0.5, -0.5):
        return None  # the CPU takes roots, with other zeros and infinities
    # If a bound is zero in single precision, devices may return zeros with different signs.
    bounds = [bound for bound in (*node.args[1:], *node.kwargs.values()) if packet in _CLAMPS and bound is not None]
    if not all(isinstance(bound, (int, float)) and torch.tensor(bound, dtype=torch.float32) for bound in bounds):
        return None
    kinds = {Kind.ROUNDS: _ARITHMETIC, Kind.JUMPS: _JUMPS, Kind.FUNCTION: _FUNCTIONS}
    return next((kind for kind, packets in kinds.items() if packet in packets), None)


def error_of(node: fx.Node, given: Error) -> Error | None:
    """The error of a node's result if its inputs have at most a given one; None if the error could be any."""
    kind = kind_of(node)
    if kind is None:
        return None
    added, most, _ = kind.value
    return max(given, added) if given <= most else None


def is_elementwise(node: fx.Node) -> bool:
    """Whether the GPU computes a known operator inside the kernel that reads it."""
    return getattr(node.target, "overloadpacket", None) not in _REDUCES | LOOKUPS.keys()


def keeps_memory(node: fx.Node) -> bool:
    """Whether the node only rearranges or looks up elements, each with the bits that it has."""
    return is_view(node) or getattr(node.target, "overloadpacket", None) in REARRANGES | LOOKUPS.keys()


def is_conversion(node: fx.Node) -> bool:
    """Whether the node gives its input's elements in another type."""
    types = [[tensor.dtype for tensor in tensors] for tensors in (tensors_given(node), tensors_of(node))]
    return getattr(node.target, "overloadpacket", None) in _CONVERTS and types[0] != types[1]


def is_negation(node: fx.Node) -> bool:
    """Whether the node negates floating-point numbers: a GPU's compiler makes that ``0 - x``, which loses -0.0."""
    return node.target is aten.neg.default and node.meta["val"].is_floating_point()


def gives_unset_memory(node: fx.Node) -> bool:
    """Whether the node's elements are undefined until a program, or a file, sets them."""
    name = str(node.target)
    return any(part in name for part in ("empty", "resize", "from_file"))


def may_wait(node: fx.Node) -> bool:
    """Whether the call may wait for the GPU, copies apart; operators that can be captured do not wait."""
    target: Any = node.target
    if node.op != "call_function" or not any(is_on_gpu(n) for n in (node, *node.all_input_nodes)):
        return False
    if not isinstance(target, torch._ops.OpOverload):
        return not (str(target) == "<built-in function getitem>" or "triton_kernel" in str(target))
    needs_numbers = torch.Tag.data_dependent_output in target.tags or torch.Tag.dynamic_output_shape in target.tags
    return (needs_numbers and not is_by_integers(node)) or torch.Tag.cudagraph_unsafe in target.tags


def _counts_alike(node: fx.Node) -> bool:
    """Whether the integers that a kernel counts fit the 32 bits that it has for them; true for any other node."""
    target: Any = node.target
    if target.overloadpacket not in _COUNTS:
        return True
    start, step = (0, 1) if target is aten.arange.default else (node.kwargs.get("start"), node.kwargs.get("step"))
    (counted,) = tensors_of(node)
    count = counted.shape[0] if isinstance(counted.shape[0], int) else _MOST_ELEMENTS
    if not isinstance(step, int):
        return False
    furthest = (abs(start) if isinstance(start, int) else _MOST_SYMBOLIC) + abs(step) * count
    return furthest < 1 << 31


def _is_fraction(number: fx.Node) -> bool:
    """Whether a number that is made of sizes may be a fraction, or is made of one (``int(n / 3)``)."""
    value = number.meta.get("val")
    parts = reached([value.node.expr], lambda part: part.args) if isinstance(value, torch.SymInt) else []
    return isinstance(value, torch.SymFloat) or not all(getattr(part, "is_integer", None) for part in parts)


def _is_large(number: fx.Node) -> bool:
    """Whether a number, or one that it is made of, exceeds what is assumed of all numbers known only at the call."""
    parts = reached(_of_sizes([number]), lambda part: _of_sizes(part.all_input_nodes))
    hints = [part.meta["val"].node.hint for part in parts]
    return any(hint is not None and abs(int(hint)) > _MOST_SYMBOLIC for hint in hints)


def _of_sizes(nodes: Iterable[fx.Node]) -> list[fx.Node]:
    return [node for node in nodes if isinstance(node.meta.get("val"), torch.SymInt)]


def _numbers_fit(node: fx.Node) -> bool:
    """Whether the given numbers fit the types of the node's tensors; devices convert others differently."""
    target: Any = node.target
    types = {tensor.dtype for tensor in [*tensors_given(node), *tensors_of(node)]} - {torch.bool}
    if keeps_memory(node) or any(dtype.is_floating_point for dtype in types):
        return True
    numbers = [arg for arg in pytree.tree_leaves((node.args, node.kwargs)) if type(arg) in (int, float)]
    if any(isinstance(number, float) for number in numbers):
        return target.overloadpacket in _COMPARES  # which happens in floating point
    limits = [(torch.iinfo(dtype).min, torch.iinfo(dtype).max) for dtype in types]
    return all(least <= number <= most for least, most in limits for number in numbers)


def _may_divide_by_zero(node: fx.Node) -> bool:
    target: Any = node.target
    if target.overloadpacket not in _DIVIDES or not (isinstance(node.args[1], fx.Node) or node.args[1] == 0):
        return False
    return all(is_integral(tensor) for tensor in tensors_of(node))  # a fractional quotient becomes infinite instead
