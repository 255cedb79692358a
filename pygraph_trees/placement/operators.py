"""Whether a node's operator can run again or on the GPU, and whether the result has the same bits there.

Each function takes an ``fx.Node`` with its value under "val" and changes nothing. A function named ``why_not_…``
returns the reason as text, or None. Operators are listed by name. An operator that no list contains counts as one that
may give another result on the GPU.
"""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.utils import _pytree as pytree

from .arithmetic import COMPUTES_NEARLY, CONVERSIONS, SINGLE, computes_in_double
from .lookups import LOOKUPS, is_by_integers, roots_of
from .nodes import (
    HALVES,
    REARRANGES,
    aten,
    held_tensor,
    is_constructor,
    is_integral,
    is_narrow,
    is_on_gpu,
    prims,
    tensors_given,
    tensors_of,
)
from .ranges import fits_integers

# The result consists of elements of the inputs, or of given numbers. It is the same on every device, for every type.
_MOVES_ELEMENTS = REARRANGES | frozenset(
    {
        aten.full, aten.zeros, aten.ones, aten.scalar_tensor, aten.full_like, aten.zeros_like, aten.ones_like,
        aten.new_full, aten.new_zeros, aten.new_ones, aten.eye, aten.tril_indices, aten.triu_indices,
        aten.view, aten.split, aten.split_with_sizes, aten.unbind, aten.diagonal,
        aten.unfold, aten.roll, aten.cat, aten.stack, aten.tril, aten.triu,
        aten.index, aten.index_select, aten.gather, aten.embedding, aten.where, aten.masked_fill,
        aten.constant_pad_nd, aten.select_scatter, aten.slice_scatter, aten.diagonal_scatter,
        aten.eq, aten.ne, aten.lt, aten.le, aten.gt, aten.ge, aten.isnan, aten.isinf, aten.logical_not,
        aten.logical_and, aten.logical_or, aten.logical_xor, aten.neg, aten.abs, aten.minimum, aten.maximum,
        aten.amax, aten.amin, aten.empty, aten.empty_strided, aten.empty_permuted, aten.empty_like, aten.new_empty,
        prims.view_of, prims.rev,
    }
)  # fmt: skip
# Integers at equal distances, from a first one on.
_COUNTS = frozenset({aten.arange, prims.iota})
# If two zeros have different signs, the result depends on the device, and on the CPU on the position as well.
_CHOOSES_ZEROS = frozenset({aten.minimum, aten.maximum, aten.amax, aten.amin})
_COMPARES = frozenset(
    {
        aten.eq, aten.ne, aten.lt, aten.le, aten.gt, aten.ge, aten.isnan, aten.isinf, aten.logical_not,
        aten.logical_and, aten.logical_or, aten.logical_xor,
    }
)  # fmt: skip
_COMPUTES_INTEGERS = frozenset(
    {
        aten.add, aten.sub, aten.mul, aten.square, aten.relu, aten.clamp, aten.clamp_min, aten.clamp_max, aten.sign,
        aten.bitwise_and, aten.bitwise_or, aten.bitwise_xor, aten.bitwise_not,
    }
)  # fmt: skip
# For integers only, whose reductions are the same on every device; a floating-point sum depends on its order.
_REDUCES = frozenset(
    {
        aten.sum, aten.prod, aten.cumsum, aten.cumprod, aten.max, aten.min, aten.argmax, aten.argmin, aten.all,
        aten.any,
    }
)  # fmt: skip
_DIVIDES = frozenset({aten.div, aten.floor_divide, aten.remainder, aten.fmod})
_NUMBERS = SINGLE | {torch.float64, torch.float16, torch.bfloat16}
_COMPLEX = frozenset({torch.complex64, torch.complex128})


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
    if not _is_known(node):
        return "it may give something else on the GPU"
    numbers = (arg for arg in pytree.tree_leaves((node.args, node.kwargs)) if isinstance(arg, float))
    if any(number == 0 and math.copysign(1, number) < 0 for number in numbers):
        return "it is given -0.0, of which the GPU's compiler may make 0.0"
    if any(map(_is_fraction, node.all_input_nodes)):
        return "it is given a fraction of sizes, which a kernel computes in single precision"
    if _may_divide_by_zero(node):
        return "it divides integers, and a division by zero is an error of the CPU's"
    if exact and not is_exact(node):
        return "its result may differ in the last place"
    return None


def fuses(node: fx.Node) -> bool:
    """Whether the GPU computes the node exactly, element by element, inside the kernel that reads it."""
    target: Any = node.target
    return target is operator.getitem or (
        target.overloadpacket not in _REDUCES and target.overloadpacket not in LOOKUPS and is_exact(node)
    )


def is_exact(node: fx.Node) -> bool:
    """Whether every device computes the same bits."""
    target: Any = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return True
    packet = target.overloadpacket
    if packet in _MOVES_ELEMENTS:
        return True
    inputs = tensors_given(node)
    if packet in CONVERSIONS:
        # CPU and GPU round alike when they narrow a type, but not when a number does not fit an integer type.
        return all(is_integral(t) for t in tensors_of(node)) <= all(is_integral(t) for t in inputs)
    return all(is_integral(tensor) for tensor in [*inputs, *tensors_of(node)])


def rounds_nearly(node: fx.Node) -> bool:
    """Whether the node's last place may differ, so that only its elements may be used further."""
    target: Any = node.target
    if not isinstance(target, torch._ops.OpOverload) or all(is_integral(tensor) for tensor in tensors_of(node)):
        return False
    return target.overloadpacket in COMPUTES_NEARLY or not (is_constructor(node) or _is_known(node))


def keeps_elements(node: fx.Node) -> bool:
    """Whether the node gives only elements of its inputs, or numbers that it takes."""
    target: Any = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return True  # one item of several
    return target.overloadpacket in _MOVES_ELEMENTS - _COMPARES


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


def _is_known(node: fx.Node) -> bool:
    """Whether every device is known to give the same, or a neighbouring number if :func:`rounds_nearly`.

    Not known are matrix products (other precisions, or none for integers), sums of floating-point numbers, choices
    among equal elements or among several writes to one place, and decompositions.
    """
    target: Any = node.target
    if target is aten.index_put.default:
        return _writes_one_number(node)
    if target is aten.view.dtype and any(tensor.dtype in HALVES | {torch.bool} for tensor in tensors_given(node)):
        return False  # a kernel holds them in single precision, or in one bit
    packet = target.overloadpacket
    types = {tensor.dtype for tensor in [*tensors_given(node), *tensors_of(node)]}
    if packet in _COMPARES and types & HALVES and len(types - {torch.bool}) > 1:
        return False  # the CPU rounds the other one to half precision first
    if packet in _MOVES_ELEMENTS:
        if packet in _CHOOSES_ZEROS and _may_choose_a_zero(node):
            return False
        # The absolute value of a complex number is a computation, and not every GPU has the other types.
        return types <= (_NUMBERS if packet is aten.abs else _NUMBERS | _COMPLEX) and _numbers_fit(node)
    if packet in CONVERSIONS:
        return _converts_alike(node)
    if not types <= _NUMBERS:
        return False
    if all(is_integral(tensor) for tensor in [*tensors_given(node), *tensors_of(node)]):
        computes = packet in _COMPUTES_INTEGERS | _COUNTS | _REDUCES | _DIVIDES or _is_small_power(node)
        return computes and _numbers_fit(node) and not _is_widened(node)
    return computes_in_double(node)


def _is_widened(node: fx.Node) -> bool:
    """Whether Inductor's code for the GPU has 32 bits, although the type has fewer and the next operator would wrap."""
    target: Any = node.target
    packet = target.overloadpacket
    floors = packet is aten.floor_divide or (packet is aten.div and node.kwargs.get("rounding_mode") is not None)
    sums = packet in (aten.sum, aten.prod, aten.cumsum, aten.cumprod)
    return (packet is aten.relu or floors or sums) and any(map(is_narrow, tensors_of(node)))


def _is_fraction(number: fx.Node) -> bool:
    """Whether a number that is made of sizes is a fraction, or is made of one (``int(n / 3)``)."""
    value = number.meta.get("val")
    return isinstance(value, torch.SymFloat) or (isinstance(value, torch.SymInt) and not _is_whole(value.node.expr))


def _is_whole(expression: Any) -> bool:
    """Whether sympy knows that an expression and all parts of it are integers."""
    return bool(getattr(expression, "is_integer", None)) and all(map(_is_whole, expression.args))


def _converts_alike(node: fx.Node) -> bool:
    """Whether devices convert alike: all round alike, but they differ in numbers that do not fit an integer type."""
    types = {tensor.dtype for tensor in [*tensors_given(node), *tensors_of(node)]}
    to_integer = all(is_integral(t) and t.dtype != torch.bool for t in tensors_of(node))
    if node.kwargs.get("memory_format") not in (None, torch.preserve_format) or not types <= _NUMBERS:
        return False
    if not to_integer or all(is_integral(t) for t in tensors_given(node)):
        return True
    return all(fits_integers(source, node.meta["val"].dtype) for source in node.all_input_nodes)


def _numbers_fit(node: fx.Node) -> bool:
    """Whether the given integers fit the types of the node's tensors; devices convert others differently."""
    types = {tensor.dtype for tensor in [*tensors_given(node), *tensors_of(node)]} - {torch.bool}
    if any(dtype.is_floating_point or dtype.is_complex for dtype in types):
        return True
    numbers = _numbers_given(node)
    if any(isinstance(number, float) for number in numbers):
        target: Any = node.target
        return target.overloadpacket in _COMPARES  # a comparison happens in floating point
    limits = [(torch.iinfo(dtype).min, torch.iinfo(dtype).max) for dtype in types] or [(0, 1)]
    return all(least <= number <= most for least, most in limits for number in numbers)


def _numbers_given(node: fx.Node) -> list[int | float]:
    """The numbers that stand for elements, not for sizes or dimensions."""
    target: Any = node.target
    arguments = target._schema.arguments
    given = [*zip(arguments, node.args, strict=False)]
    given += [(argument, node.kwargs[argument.name]) for argument in arguments if argument.name in node.kwargs]
    return [
        value
        for argument, value in given
        if isinstance(value, (int, float))
        and not isinstance(value, bool)
        and str(argument.type).removeprefix("Optional[").removesuffix("]") in ("Tensor", "number")
    ]


def _is_small_power(node: fx.Node) -> bool:
    return node.target is aten.pow.Tensor_Scalar and isinstance(node.args[1], int) and 0 <= node.args[1] < 32


def _writes_one_number(node: fx.Node) -> bool:
    """Whether all writes to one place carry the same number, so that the order of ``index_put`` does not matter."""
    values, *accumulates = node.args[2:]
    if any(accumulates) or not isinstance(values, fx.Node):
        return False
    return all(statically_known_true(tensor.numel() == 1) for tensor in tensors_of(values))


def _may_divide_by_zero(node: fx.Node) -> bool:
    target: Any = node.target
    if target.overloadpacket not in _DIVIDES or not (isinstance(node.args[1], fx.Node) or node.args[1] == 0):
        return False
    return all(is_integral(tensor) for tensor in tensors_of(node))  # a fractional quotient becomes infinite instead


def _may_choose_a_zero(node: fx.Node) -> bool:
    """Whether the node may have to choose between two zeros with different signs."""
    if all(is_integral(tensor) for tensor in tensors_of(node)):
        return False
    return not any(
        _is_never_zero(root) for arg in node.args[:2] if isinstance(arg, fx.Node) for root in _only_root(arg)
    )


def _only_root(node: fx.Node) -> list[fx.Node]:
    roots = roots_of(node)
    return roots if len(roots) == 1 else []


def _is_never_zero(node: fx.Node) -> bool:
    if node.target is aten.full.default:
        number = node.args[1]
        return isinstance(number, (int, float)) and bool(torch.tensor(number, dtype=node.meta["val"].dtype) != 0)
    held = held_tensor(node)
    if held is None:
        return False
    with unset_fake_temporarily():
        return bool((held != 0).all())
