"""Whether a CPU node's operator can run again or on the GPU, and how close the result is there.

Each function takes an ``fx.Node`` with its value under "val" and changes nothing. An operator that no list names may
give another result on the GPU. An index out of bounds raises on the CPU, but ends all work of the process on the GPU.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable
from enum import Enum, IntEnum
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils import _pytree as pytree

from pygraph_trees.reasons import Reason, Why

from . import nodes
from .nodes import HALVES, aten, named, prims

# The result consists of elements of the inputs, or of given numbers. It is the same on every device, for every type.
_MOVES_ELEMENTS = nodes.REARRANGES | named(
    "full zeros ones scalar_tensor full_like zeros_like ones_like new_full new_zeros new_ones eye tril_indices "
    "triu_indices view split split_with_sizes unbind diagonal unfold roll cat stack tril triu index index_select "
    "gather embedding where masked_fill constant_pad_nd select_scatter slice_scatter diagonal_scatter neg abs empty "
    "empty_strided empty_permuted empty_like new_empty",
    prims.view_of,
    prims.rev,
)
COMPARES = named("eq ne lt le gt ge isnan isinf logical_not logical_and logical_or logical_xor")
_CONVERTS = frozenset({aten._to_copy, prims.convert_element_type})  # possibly to another device as well
# Integers at equal distances, from a first one on.
_COUNTS = frozenset({aten.arange, prims.iota})
_DIVIDES = named("div floor_divide remainder fmod")
# For integers only: a floating-point sum depends on its order, and devices choose different ones of two zeros.
_REDUCES = named("sum prod cumsum cumprod max min amax amin argmax argmin all any")
_CLAMPS = named("clamp clamp_min clamp_max")
_COMPUTES_INTEGERS = _COUNTS | _DIVIDES | _REDUCES | _CLAMPS
_COMPUTES_INTEGERS |= named(
    "add sub mul square relu sign minimum maximum bitwise_and bitwise_or bitwise_xor bitwise_not"
)
# Single precision. Devices round each result alike, but a compiler may fuse a product and a sum, which rounds once, or
# divide approximately.
_ARITHMETIC = named("add sub mul div reciprocal square")
# Exact, but discontinuous: neighbouring inputs may have very different results.
_JUMPS = named("fmod ceil floor trunc round sign copysign")
_FUNCTIONS = named("exp exp2 expm1 sin cos tanh atan erf erfc")
# They are infinite, NaN or discontinuous at zero, or elsewhere.
_EDGES_AT_ZERO = named("sqrt rsqrt pow log log2 log10")
_EDGES = named("log1p tan asin acos atan2")
_NOT_NEGATIVE = named("abs square exp exp2 sqrt")
# The CPU computes in single precision with these types, and converts them to it first.
_SINGLE = frozenset({torch.float32, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool})
_WHOLE = frozenset({torch.int64, torch.int32, torch.bool})
# Assumed if a number is known only at the call: it is a size or a position, and no program makes more elements on
# the CPU at each call. Torch itself assumes the same of the values that it moves.
_MOST_ELEMENTS, _MOST_SYMBOLIC = 1 << 24, 1 << 30
# Elements at indices: from the operator to the position of the indices among its arguments.
_LOOKUPS = {aten.index: 1, aten.index_select: 2, aten.gather: 2, aten.embedding: 1}


class Error(IntEnum):
    """How far a value that the GPU computes may be from the CPU's."""

    NONE = 0  # the same bits
    ROUNDING = 1  # of single-precision arithmetic: it is zero if the CPU's is, and has the same sign
    DIFFERENCE = 2  # of numbers that are rounded: it may be zero or not, of either sign
    FUNCTION = 3  # of a function such as `exp`


class Kind(Enum):
    """How an operator's result on the GPU compares with the CPU's.

    A kind has the error that it adds, the largest one in its inputs with which the result is known, and whether the
    operator computes floating-point numbers.
    """

    MOVES = Error.NONE, Error.FUNCTION, False  # elements of the inputs, or given numbers
    CONVERTS = Error.NONE, Error.DIFFERENCE, False  # the same fractions, or integers as fractions, in another type
    EXACT = Error.NONE, Error.NONE, False  # the same bits
    JUMPS = Error.NONE, Error.NONE, True  # the same bits for the same input, but discontinuous
    CLAMPS = Error.NONE, Error.DIFFERENCE, True  # the same bits for the same input
    ROUNDS = Error.ROUNDING, Error.DIFFERENCE, True  # single-precision arithmetic, which may be rounded differently
    FUNCTION = Error.FUNCTION, Error.DIFFERENCE, True  # such as `exp`, for which devices have different algorithms
    EDGE_AT_ZERO = Error.FUNCTION, Error.ROUNDING, True  # such as `sqrt`
    EDGE = Error.FUNCTION, Error.NONE, True  # such as `asin`


def why_not_the_same_again(node: fx.Node) -> Why | None:
    """Says why a call cannot run again, or elsewhere, in place of the program's; None if it can."""
    target = node.target
    if node.op != "call_function":
        return Reason.NODE(op=node.op)
    if not isinstance(target, torch._ops.OpOverload) or target.namespace not in ("aten", "prims"):
        return Reason.CUSTOM()
    if target._schema.is_mutable:
        return Reason.WRITES()
    # Seeds, and values made from them.
    if torch.Tag.nondeterministic_seeded in target.tags or "inductor_" in str(target):
        return Reason.RANDOM()
    if torch.Tag.data_dependent_output in target.tags or (
        torch.Tag.dynamic_output_shape in target.tags and not is_by_integers(node)
    ):
        return Reason.NUMBER_NEEDED()
    return Reason.SPARSE() if any(t.layout != torch.strided for t in nodes.tensors_of(node)) else None


def why_not_elsewhere(node: fx.Node, *, exact: bool) -> Why | None:
    """Says why a call may give another result on another device, or round there (``exact``); None if it does not."""
    if node.op == "call_function" and node.target is operator.getitem:
        return None
    if (why := why_not_the_same_again(node)) is not None:
        return why
    if (kind := kind_of(node)) is None:
        return Reason.DIFFERENT()
    numbers = (arg for arg in pytree.tree_leaves((node.args, node.kwargs)) if isinstance(arg, float))
    tiny = 2**-25 if any(t.dtype in HALVES for t in nodes.tensors_of(node)) else 0  # rounds to zero
    if any(-tiny <= number <= 0 and math.copysign(1, number) < 0 for number in numbers):
        return Reason.MINUS_ZERO()
    if any(map(_is_fraction, node.all_input_nodes)):
        return Reason.FRACTION()
    if any(map(_is_large, node.all_input_nodes)):
        return Reason.LARGE_NUMBER()
    # A fractional quotient becomes infinite instead.
    divides = nodes.packet_of(node) in _DIVIDES and all(map(nodes.is_integral, nodes.tensors_of(node)))
    if divides and (isinstance(node.args[1], fx.Node) or node.args[1] == 0):
        return Reason.DIVIDES()
    return Reason.LAST_PLACE() if exact and kind.value[-1] else None


def kind_of(node: fx.Node) -> Kind | None:
    """The kind of a node whose operator can run elsewhere; None if the GPU may give anything else.

    That holds for matrix products (other precisions, or none for integers), sums of floating-point numbers, choices
    among equal elements or among several writes to one place, and decompositions.
    """
    target: Any = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return Kind.MOVES  # one item of several
    packet, given, result = target.overloadpacket, nodes.tensors_given(node), nodes.tensors_of(node)
    types = {tensor.dtype for tensor in [*given, *result]}
    to_integers, of_integers = all(map(nodes.is_integral, result)), all(map(nodes.is_integral, given))
    # The absolute value of a complex number is a computation, and not every GPU has the other types.
    if not (types <= _SINGLE | HALVES | {torch.float64} and _numbers_fit(node)):
        return None
    if packet in _MOVES_ELEMENTS:
        if target is aten.view.dtype:  # a kernel holds half precision in single precision, and a mask in one bit
            return None if types & (HALVES | {torch.bool}) else Kind.EXACT
        return Kind.MOVES
    if packet in COMPARES:
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
    packet = nodes.packet_of(node)
    if "rounding_mode" in node.kwargs or node.kwargs.get("decimals"):
        return None
    if node.target is aten.pow.Tensor_Scalar and node.args[1] in (0.5, -0.5):
        return None  # the CPU takes roots, with other zeros and infinities
    # If a bound is zero in single precision, devices may return zeros with different signs.
    bounds = [bound for bound in (*node.args[1:], *node.kwargs.values()) if packet in _CLAMPS and bound is not None]
    if not all(isinstance(bound, (int, float)) and torch.tensor(bound, dtype=torch.float32) for bound in bounds):
        return None
    kinds = {Kind.CLAMPS: _CLAMPS, Kind.ROUNDS: _ARITHMETIC, Kind.JUMPS: _JUMPS, Kind.FUNCTION: _FUNCTIONS}
    kinds |= {Kind.EDGE_AT_ZERO: _EDGES_AT_ZERO, Kind.EDGE: _EDGES}
    return next((kind for kind, packets in kinds.items() if packet in packets), None)


def _is_not_negative(value: Any, depth: int = 8) -> bool:
    """Whether the operators that make a value show that it is nowhere negative."""
    if not isinstance(value, fx.Node):
        return isinstance(value, (int, float)) and value >= 0
    packet, inputs = nodes.packet_of(value), value.args[:2]
    if nodes.is_copy_between_devices(value):
        return depth > 0 and _is_not_negative(inputs[0], depth - 1)
    if packet in _NOT_NEGATIVE or any(t.dtype in (torch.bool, torch.uint8) for t in nodes.tensors_of(value)):
        return True
    if packet is aten.mul and inputs[0] is inputs[1]:
        return True
    if packet not in _ARITHMETIC - {aten.sub} | _CONVERTS or "alpha" in value.kwargs:
        return False
    parts = inputs[: 1 if packet in _CONVERTS else 2]
    return depth > 0 and all(_is_not_negative(part, depth - 1) for part in parts)


def error_of(node: fx.Node, given: Error) -> Error | None:
    """The error of a node's result if its inputs have at most a given one; None if the error could be any."""
    if (kind := kind_of(node)) is None:
        return None
    added, most, _ = kind.value
    if kind is Kind.ROUNDS and _may_cancel(node, given):
        added = Error.DIFFERENCE
    return max(given, added) if given <= most else None


def _may_cancel(node: fx.Node, given: Error) -> bool:
    """Whether a sum may be close to zero, of numbers with an error: a compiler may fuse a product with it."""
    is_sum = nodes.packet_of(node) in (aten.add, aten.sub) and (given is not Error.NONE or "alpha" in node.kwargs)
    return is_sum and not _is_not_negative(node)


def error_unless_it_jumps(node: fx.Node, given: Error) -> Error | None:
    """The error of a GPU node's result; None if inputs that differ by a given one may have very different results."""
    packet, error = nodes.packet_of(node), Error.DIFFERENCE if _may_cancel(node, given) else given
    if any(map(nodes.is_integral, nodes.tensors_of(node))):
        jumps = not all(map(nodes.is_integral, nodes.tensors_given(node)))
    elif packet in _EDGES_AT_ZERO and given >= Error.DIFFERENCE:
        jumps = not all(map(_is_not_negative, node.all_input_nodes))
    else:
        jumps = packet in _EDGES | _JUMPS | _DIVIDES - {aten.div} or "rounding_mode" in node.kwargs
    return None if jumps else max(error, given)


def indices_of(node: fx.Node) -> list[tuple[int, fx.Node]]:
    """The inputs whose numbers select the node's elements, each with the dimension that it indexes."""
    if (position := _LOOKUPS.get(nodes.packet_of(node))) is None:
        return []
    given = node.args[position]
    several = enumerate(given) if isinstance(given, (list, tuple)) else [(node.args[1] if position == 2 else 0, given)]
    return [(dim, index) for dim, index in several if isinstance(index, fx.Node)]


def looks_up_within(node: fx.Node, value_of: Callable[[fx.Node], torch.Tensor | None]) -> bool:
    """Whether constant indices, as ``value_of`` knows them, are within the dimensions that they index."""
    looked_up: Any = node.args[0]
    sizes = looked_up.meta["val"].shape or (1,)
    for dim, index in indices_of(node):
        size, value = sizes[dim], value_of(index)
        if value is None or not isinstance(size, int):
            return False
        least = -size if node.target is aten.index.Tensor else 0  # negative indices count from the end
        with unset_fake_temporarily():
            if value.numel() and not least <= int(value.min()) <= int(value.max()) < size:
                return False
    return True


def is_by_integers(node: fx.Node) -> bool:
    """Whether the node is an index whose number of elements does not depend on the values."""
    masks = (torch.bool, torch.uint8)
    return node.target is aten.index.Tensor and not any(i.meta["val"].dtype in masks for _, i in indices_of(node))


def is_sum_of_another(node: fx.Node) -> bool:
    """Whether a floating-point sum stands for another operator, such as a product of vectors, that rounds otherwise."""
    original = node.meta.get("original_aten")
    is_sum = nodes.packet_of(node) is aten.sum and not nodes.is_integral(node.meta["val"])
    return is_sum and original is not None and getattr(original, "overloadpacket", original) is not aten.sum


def is_elementwise(node: fx.Node) -> bool:
    """Whether the GPU computes a known operator inside the kernel that reads it."""
    return nodes.packet_of(node) not in _REDUCES | _LOOKUPS.keys()


def keeps_memory(node: fx.Node) -> bool:
    """Whether the node only rearranges or looks up elements, each with the bits that it has."""
    return nodes.is_view(node) or nodes.packet_of(node) in nodes.REARRANGES | _LOOKUPS.keys()


def is_conversion(node: fx.Node) -> bool:
    """Whether the node gives its input's elements in another type."""
    return nodes.packet_of(node) in _CONVERTS and nodes.tensors_given(node)[0].dtype != node.meta["val"].dtype


def may_wait(node: fx.Node) -> bool:
    """Whether the call may wait for the GPU, copies apart; operators that can be captured do not wait."""
    target: Any = node.target
    if node.op != "call_function" or not any(nodes.is_on_gpu(n) for n in (node, *node.all_input_nodes)):
        return False
    if not isinstance(target, torch._ops.OpOverload):
        return not (str(target) == "<built-in function getitem>" or "triton_kernel" in str(target))
    needs_numbers = torch.Tag.data_dependent_output in target.tags or torch.Tag.dynamic_output_shape in target.tags
    return (needs_numbers and not is_by_integers(node)) or torch.Tag.cudagraph_unsafe in target.tags


def _counts_alike(node: fx.Node) -> bool:
    """Whether the integers that a kernel counts fit the 32 bits that it has for them; true for any other node."""
    if nodes.packet_of(node) not in _COUNTS:
        return True
    start, step = (0, 1) if node.target is aten.arange.default else (node.kwargs.get("start"), node.kwargs.get("step"))
    (counted,) = nodes.tensors_of(node)
    count = counted.shape[0] if isinstance(counted.shape[0], int) else _MOST_ELEMENTS
    if not isinstance(step, int):
        return False
    furthest = (abs(start) if isinstance(start, int) else _MOST_SYMBOLIC) + abs(step) * count
    return furthest < 1 << 31


def _is_fraction(number: fx.Node) -> bool:
    """Whether a number that is made of sizes may be a fraction, or is made of one (``int(n / 3)``)."""
    value = number.meta.get("val")
    parts = nodes.reached([value.node.expr], lambda part: part.args) if isinstance(value, torch.SymInt) else []
    return isinstance(value, torch.SymFloat) or not all(getattr(part, "is_integer", None) for part in parts)


def _is_large(number: fx.Node) -> bool:
    """Whether a number, or one that it is made of, exceeds what is assumed of all numbers known only at the call."""
    parts = nodes.reached(_of_sizes([number]), lambda part: _of_sizes(part.all_input_nodes))
    hints = [part.meta["val"].node.hint for part in parts]
    return any(hint is not None and abs(int(hint)) > _MOST_SYMBOLIC for hint in hints)


def _of_sizes(numbers: Iterable[fx.Node]) -> list[fx.Node]:
    return [node for node in numbers if isinstance(node.meta.get("val"), torch.SymInt)]


def _numbers_fit(node: fx.Node) -> bool:
    """Whether the given numbers fit the types of the node's tensors; devices convert others differently."""
    types = {tensor.dtype for tensor in [*nodes.tensors_given(node), *nodes.tensors_of(node)]} - {torch.bool}
    if keeps_memory(node) or any(dtype.is_floating_point for dtype in types):
        return True
    numbers = [arg for arg in pytree.tree_leaves((node.args, node.kwargs)) if type(arg) in (int, float)]
    if any(isinstance(number, float) for number in numbers):
        return nodes.packet_of(node) in COMPARES  # which happens in floating point
    limits = [(torch.iinfo(dtype).min, torch.iinfo(dtype).max) for dtype in types]
    return all(least <= number <= most for least, most in limits for number in numbers)
