"""What a node of a post-grad graph is: where its value lies, and whether it is the same on another device."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.utils import _pytree as pytree

from pygraph_trees.report.naming import source_line

from .ranges import fits_integers

aten, prims = torch.ops.aten, torch.ops.prims

# Of a tensor: to another device, perhaps of another type.
_COPIES = (aten._to_copy.default, prims.device_put.default, aten.to.device)

# What comes out does not depend on how a device computes, whatever the type: nothing but elements of inputs, or numbers
# that are given.
_MOVES_ELEMENTS = frozenset(
    {
        aten.full, aten.zeros, aten.ones, aten.scalar_tensor, aten.full_like, aten.zeros_like, aten.ones_like,
        aten.new_full, aten.new_zeros, aten.new_ones, aten.eye, aten.tril_indices, aten.triu_indices,
        aten.lift_fresh_copy, aten.clone, aten.alias, aten.detach,
        aten.view, aten._unsafe_view, aten.reshape, aten.expand, aten.permute, aten.t, aten.transpose, aten.squeeze,
        aten.unsqueeze, aten.select, aten.slice, aten.split, aten.split_with_sizes, aten.unbind, aten.diagonal,
        aten.unfold, aten.flip, aten.roll, aten.repeat, aten.cat, aten.stack, aten.tril, aten.triu,
        aten.index, aten.index_select, aten.gather, aten.embedding, aten.where, aten.masked_fill,
        aten.constant_pad_nd, aten.select_scatter, aten.slice_scatter, aten.diagonal_scatter,
        aten.eq, aten.ne, aten.lt, aten.le, aten.gt, aten.ge, aten.isnan, aten.isinf, aten.logical_not,
        aten.logical_and, aten.logical_or, aten.logical_xor, aten.neg, aten.abs, aten.minimum, aten.maximum,
        aten.amax, aten.amin, aten.empty, aten.empty_strided, aten.empty_permuted, aten.empty_like, aten.new_empty,
        prims.view_of, prims.rev,
    }
)  # fmt: skip
# Integers from a first one on, each as far from the one before.
_COUNTS = frozenset({aten.arange, prims.iota})
# Which of two zeros with different signs they give differs from device to device, and on the CPU from place to place.
_CHOOSES_ZEROS = frozenset({aten.minimum, aten.maximum, aten.amax, aten.amin})
# What they read depends on numbers among their inputs. One that is out of bounds is an error on the CPU, after which
# the program goes on; on the GPU it ends all work of the process.
_LOOKS_UP = {aten.index: 1, aten.index_select: 2, aten.gather: 2, aten.embedding: 1, aten.index_put: 1}  # argument
# Nothing but elements of inputs, whatever these are.
_PASSES_ELEMENTS = frozenset(
    {
        aten.lift_fresh_copy, aten.clone, aten.alias, aten.detach, aten.view, aten._unsafe_view, aten.reshape,
        aten.expand, aten.permute, aten.t, aten.transpose, aten.squeeze, aten.unsqueeze, aten.select, aten.slice,
        aten.flip, aten.roll, aten.repeat, aten.cat, aten.stack,
    }
)  # fmt: skip
_COMPARES = frozenset(
    {
        aten.eq, aten.ne, aten.lt, aten.le, aten.gt, aten.ge, aten.isnan, aten.isinf, aten.logical_not,
        aten.logical_and, aten.logical_or, aten.logical_xor,
    }
)  # fmt: skip
# What IEEE 754 says to the bit, for numbers of single precision that are computed with in double precision and rounded.
_COMPUTES = frozenset(
    {
        aten.add, aten.sub, aten.mul, aten.div, aten.reciprocal, aten.square, aten.fmod, aten.clamp,
        aten.clamp_min, aten.clamp_max, aten.ceil, aten.floor, aten.trunc, aten.round, aten.sign, aten.copysign,
    }
)  # fmt: skip
# The same with double precision's own error, which may be the last place of what the CPU finds in single precision.
# Measured: other functions differ by more, for the CPU's are not that near. IEEE 754 says a square root to the bit, but
# the CPU takes it from MKL, which does not.
_COMPUTES_NEARLY = frozenset(
    {
        aten.sqrt, aten.rsqrt, aten.pow, aten.exp, aten.exp2, aten.expm1, aten.log, aten.log2, aten.log10, aten.log1p,
        aten.sin, aten.cos, aten.tan, aten.tanh, aten.asin, aten.acos, aten.atan, aten.atan2, aten.erf, aten.erfc,
    }
)  # fmt: skip
_COMPUTES_INTEGERS = frozenset(
    {
        aten.add, aten.sub, aten.mul, aten.square, aten.relu, aten.clamp, aten.clamp_min, aten.clamp_max, aten.sign,
        aten.bitwise_and, aten.bitwise_or, aten.bitwise_xor, aten.bitwise_not,
    }
)  # fmt: skip
# Of integers, which every device adds up to the same; sums of others depend on their order.
_REDUCES = frozenset(
    {
        aten.sum, aten.prod, aten.cumsum, aten.cumprod, aten.max, aten.min, aten.argmax, aten.argmin, aten.all,
        aten.any,
    }
)  # fmt: skip
_DIVIDES = frozenset({aten.div, aten.floor_divide, aten.remainder, aten.fmod})
_TYPES = frozenset({aten._to_copy, prims.convert_element_type})  # and perhaps to another device
_CLAMPS = frozenset({aten.clamp, aten.clamp_min, aten.clamp_max})
# Their numbers are taken in the type of their tensors.
_TAKE_NUMBERS = frozenset(
    {
        aten.full, aten.full_like, aten.new_full, aten.scalar_tensor, aten.masked_fill, aten.where,
        aten.constant_pad_nd, aten.eq, aten.ne, aten.lt, aten.le, aten.gt, aten.ge,
    }
)  # fmt: skip
_CHOOSES = frozenset({aten.minimum, aten.maximum})
HALVES = frozenset({torch.float16, torch.bfloat16})


def tensors_of(node: fx.Node) -> list[torch.Tensor]:
    """The tensors of its value."""
    return [leaf for leaf in pytree.tree_leaves(node.meta.get("val")) if isinstance(leaf, torch.Tensor)]


def device_of(node: fx.Node) -> torch.device | None:
    """Where its value lies; None where it has no tensors or lies in several places."""
    devices = {tensor.device for tensor in tensors_of(node)}
    return devices.pop() if len(devices) == 1 else None


def is_on_cpu(node: fx.Node) -> bool:
    device = device_of(node)
    return device is not None and device.type == "cpu"


def is_on_gpu(node: fx.Node) -> bool:
    device = device_of(node)
    return device is not None and device.type == "cuda"


def nbytes_of(node: fx.Node) -> int | float:
    """Of its tensors; infinity where a size is not known."""
    total = 0
    for tensor in tensors_of(node):
        try:
            total += int(tensor.numel()) * tensor.element_size() if isinstance(tensor.numel(), int) else _hinted(tensor)
        except Exception:
            return math.inf
    return total


def _hinted(tensor: torch.Tensor) -> int:
    size: Any = tensor.numel()
    return int(size.node.hint) * tensor.element_size()


def is_copy_between_devices(node: fx.Node) -> bool:
    """Whether it gives a tensor that lies elsewhere than the one it is given."""
    if node.op != "call_function" or node.target not in _COPIES or not node.args:
        return False
    source = node.args[0]
    return (
        isinstance(source, fx.Node)
        and None not in (device_of(source), device_of(node))
        and (device_of(source) != device_of(node))
    )


def is_constructor(node: fx.Node) -> bool:
    """Whether it makes a tensor of numbers alone."""
    return (
        node.op == "call_function"
        and isinstance(node.target, torch._ops.OpOverload)
        and "device" in node.kwargs
        and not any(tensors_of(source) for source in node.all_input_nodes)
    )


def why_not_the_same_again(node: fx.Node) -> str | None:
    """Why a call cannot be made another time, or elsewhere, in place of the program's; None if it can."""
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
        torch.Tag.dynamic_output_shape in target.tags and not _is_by_integers(node)
    ):
        return "its size or its result is a number that the CPU needs"
    if not tensors_of(node) or any(device.type != "cpu" for device in {t.device for t in tensors_of(node)}):
        return "its result does not lie on the CPU"
    if any(t.layout != torch.strided for t in tensors_of(node)):
        return "it is sparse"
    return None


def why_not_elsewhere(node: fx.Node, *, exact: bool) -> str | None:
    """Why a call cannot be made on another device with the same result; None where it can.

    Args:
        exact: leave what rounds to the CPU.
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
    if _may_divide_by_zero(node):
        return "it divides integers, and a division by zero is an error of the CPU's"
    if exact and not is_exact(node):
        return "its result may differ in the last place"
    return None


def fuses(node: fx.Node) -> bool:
    """Whether the GPU computes it element by element, in the kernel of what reads it, from integers or by moving."""
    target: Any = node.target
    return target is operator.getitem or (
        target.overloadpacket not in _REDUCES and target.overloadpacket not in _LOOKS_UP and is_exact(node)
    )


def gives_unset_memory(node: fx.Node) -> bool:
    """Whether nothing says what its elements are, but for what a program writes there; or a file does."""
    name = str(node.target)
    return any(part in name for part in ("empty", "resize", "from_file"))


def _is_known(node: fx.Node) -> bool:
    """Whether it is known that every device gives the same, or the next number to it where :func:`rounds_nearly`.

    Not so are products of matrices, which have other precisions or do not exist for integers; sums of floating-point
    numbers; what chooses among equal elements, or among several that are written to one place; decompositions.
    """
    target: Any = node.target
    if target is aten.index_put.default:
        return _writes_one_number(node)
    if target is aten.view.dtype and any(tensor.dtype in HALVES for tensor in _tensors_given(node)):
        return False  # in a kernel they are single precision
    packet = target.overloadpacket
    types = {tensor.dtype for tensor in [*_tensors_given(node), *tensors_of(node)]}
    if packet in _MOVES_ELEMENTS:
        if packet in _CHOOSES_ZEROS and _may_choose_a_zero(node):
            return False
        # The absolute value of a complex number is computed; and not every GPU has other types.
        return types <= (_NUMBERS if packet is aten.abs else _NUMBERS | _COMPLEX) and _numbers_fit(node)
    if packet in _TYPES:
        return _converts_alike(node)
    if not types <= _NUMBERS:
        return False
    if all(_is_integral(tensor) for tensor in [*_tensors_given(node), *tensors_of(node)]):
        computes = packet in _COMPUTES_INTEGERS | _COUNTS | _REDUCES | _DIVIDES or _is_small_power(node)
        return computes and _numbers_fit(node)
    return computes_in_double(node)


def _numbers_fit(node: fx.Node) -> bool:
    """Whether integers that it is given are numbers of its tensors' types; what others become differs."""
    types = {tensor.dtype for tensor in [*_tensors_given(node), *tensors_of(node)]} - {torch.bool}
    if any(dtype.is_floating_point or dtype.is_complex for dtype in types):
        return True
    numbers = _numbers_given(node)
    if any(isinstance(number, float) for number in numbers):
        target: Any = node.target
        return target.overloadpacket in _COMPARES  # in floating point
    limits = [(torch.iinfo(dtype).min, torch.iinfo(dtype).max) for dtype in types] or [(0, 1)]
    return all(least <= number <= most for least, most in limits for number in numbers)


def _numbers_given(node: fx.Node) -> list[int | float]:
    """Those that stand for elements, not for sizes or dimensions."""
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


def _may_choose_a_zero(node: fx.Node) -> bool:
    """Whether both of two zeros, with different signs, may be among what it chooses from."""
    if all(_is_integral(tensor) for tensor in tensors_of(node)):
        return False
    return not any(
        _is_never_zero(root) for arg in node.args[:2] if isinstance(arg, fx.Node) for root in _only_root(arg)
    )


def _only_root(node: fx.Node) -> list[fx.Node]:
    roots = _roots(node)
    return roots if len(roots) == 1 else []


def _is_never_zero(node: fx.Node) -> bool:
    if node.target is aten.full.default:
        return isinstance(node.args[1], (int, float)) and node.args[1] != 0
    held = held_tensor(node)
    if held is None:
        return False
    with unset_fake_temporarily():
        return bool((held != 0).all())


def computes_in_double(node: fx.Node) -> bool:
    """Whether the CPU computes it in single precision, and the GPU finds the same by double precision, rounded."""
    target: Any = node.target
    if not isinstance(target, torch._ops.OpOverload) or target.overloadpacket not in _COMPUTES | _COMPUTES_NEARLY:
        return False
    if "rounding_mode" in node.kwargs or node.kwargs.get("alpha", 1) != 1 or node.kwargs.get("decimals"):
        return False
    if target.overloadpacket in _CLAMPS and not _clamps_beside_zero(node):
        return False
    for arg in pytree.tree_leaves((node.args, node.kwargs)):
        if isinstance(arg, fx.Node):
            if isinstance(arg.meta.get("val"), (torch.SymFloat, torch.SymInt)):
                return False  # the CPU makes it a number of single precision first
        elif not (arg is None or isinstance(arg, float) or (isinstance(arg, int) and abs(arg) <= 1 << 24)):
            return False
    return {t.dtype for t in tensors_of(node)} == {torch.float32} and {t.dtype for t in _tensors_given(node)} <= _SINGLE


def _clamps_beside_zero(node: fx.Node) -> bool:
    """Whether no bound is zero: which of two zeros comes out, the CPU's or the one with the other sign, differs."""
    bounds = [bound for bound in (*node.args[1:], *node.kwargs.values()) if bound is not None]
    return all(isinstance(bound, (int, float)) and bound != 0 for bound in bounds)


def is_conversion(node: fx.Node) -> bool:
    """Whether it gives its input's elements in another type."""
    target: Any = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return False
    return target.overloadpacket in _TYPES and [t.dtype for t in _tensors_given(node)] != [
        t.dtype for t in tensors_of(node)
    ]


def is_negation(node: fx.Node) -> bool:
    """Whether it turns the signs of floating-point numbers: a GPU's compiler makes that ``0 - x``, and -0.0 is lost."""
    return node.target is aten.neg.default and node.meta["val"].is_floating_point()


def half_of(node: fx.Node) -> torch.dtype | None:
    """The type of half precision in which it takes numbers that it is given, None where there is none."""
    target: Any = node.target
    if not isinstance(target, torch._ops.OpOverload) or target.overloadpacket not in _TAKE_NUMBERS:
        return None
    types = {tensor.dtype for tensor in [*_tensors_given(node), *tensors_of(node)] if tensor.is_floating_point()}
    return types.pop() if len(types) == 1 and types <= HALVES else None


def mixes_with_half(node: fx.Node) -> bool:
    """Whether it gives numbers of half precision, and is given numbers that may not be: single ones or integers.

    What is given stands in place of its tensors' elements there, and the CPU rounds it where it stores the result.
    """
    target: Any = node.target
    value = node.meta["val"]
    if not isinstance(value, torch.Tensor) or value.dtype not in HALVES or is_constructor(node):
        return False
    if not isinstance(target, torch._ops.OpOverload) or target.overloadpacket not in _TAKE_NUMBERS | _CHOOSES:
        return False
    numbers = [
        arg.meta["val"] if isinstance(arg, fx.Node) else arg for arg in pytree.tree_leaves((node.args, node.kwargs))
    ]
    return any(
        number.is_floating_point() and number.dtype != value.dtype
        if isinstance(number, torch.Tensor)
        else isinstance(number, (int, torch.SymInt, torch.SymFloat)) and not isinstance(number, bool)
        for number in numbers
    )


def terms_of(node: fx.Node, args: Sequence[Any]) -> tuple[Any, Any] | None:
    """Of those arguments, the dividend and the divisor; None where it is no quotient."""
    target: Any = node.target
    return (args[0], args[1]) if target.overloadpacket is aten.div else None


def factors_of(node: fx.Node, args: Sequence[Any]) -> tuple[Any, Any] | None:
    """Of those arguments, what the node multiplies; None where it is no product."""
    target: Any = node.target
    if target.overloadpacket is aten.mul:
        return args[0], args[1]
    if target.overloadpacket is aten.square or (target is aten.pow.Tensor_Scalar and args[1] == 2):
        return args[0], args[0]
    return None


def is_inverse_root(node: fx.Node) -> bool:
    """Whether it is a power that a CPU computes as one over a square root, which has other zeros and infinities."""
    return node.target is aten.pow.Tensor_Scalar and node.args[1] == -0.5


def takes_from_gpu(node: fx.Node) -> bool:
    """Whether it writes, to memory of the CPU, what comes from the GPU or depends on it; copies apart."""
    return node.op == "call_function" and is_on_cpu(node) and any(map(is_on_gpu, node.all_input_nodes))


def may_wait(node: fx.Node) -> bool:
    """Whether a program may have waited for the GPU behind a call, copies apart; what can be captured does not wait."""
    target: Any = node.target
    if node.op != "call_function" or not any(is_on_gpu(n) for n in (node, *node.all_input_nodes)):
        return False
    if not isinstance(target, torch._ops.OpOverload):
        return not (str(target) == "<built-in function getitem>" or "triton_kernel" in str(target))
    needs_numbers = torch.Tag.data_dependent_output in target.tags or torch.Tag.dynamic_output_shape in target.tags
    return (needs_numbers and not _is_by_integers(node)) or torch.Tag.cudagraph_unsafe in target.tags


def rounds_nearly(node: fx.Node) -> bool:
    """Whether its last place may differ, so that nothing but its elements is to be had of it."""
    target: Any = node.target
    if not isinstance(target, torch._ops.OpOverload) or all(_is_integral(tensor) for tensor in tensors_of(node)):
        return False
    return target.overloadpacket in _COMPUTES_NEARLY or not (is_constructor(node) or _is_known(node))


def keeps_elements(node: fx.Node) -> bool:
    """Whether it gives nothing but elements of its inputs, or numbers that it is given."""
    target: Any = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return True  # an item of several
    return target.overloadpacket in _MOVES_ELEMENTS - _COMPARES


# What a CPU computes with in single precision, and makes that of before.
_SINGLE = frozenset({torch.float32, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool})
_NUMBERS = _SINGLE | {torch.float64, torch.float16, torch.bfloat16}
_COMPLEX = frozenset({torch.complex64, torch.complex128})


def _tensors_given(node: fx.Node) -> list[torch.Tensor]:
    return [tensor for source in node.all_input_nodes for tensor in tensors_of(source)]


def _converts_alike(node: fx.Node) -> bool:
    """All round alike; what does not fit into an integer is another number on each device."""
    types = {tensor.dtype for tensor in [*_tensors_given(node), *tensors_of(node)]}
    to_integer = all(_is_integral(t) and t.dtype != torch.bool for t in tensors_of(node))
    if node.kwargs.get("memory_format") not in (None, torch.preserve_format) or not types <= _NUMBERS:
        return False
    if not to_integer or all(_is_integral(t) for t in _tensors_given(node)):
        return True
    return all(fits_integers(source, node.meta["val"].dtype) for source in node.all_input_nodes)


def _is_small_power(node: fx.Node) -> bool:
    return node.target is aten.pow.Tensor_Scalar and isinstance(node.args[1], int) and 0 <= node.args[1] < 32


def _writes_one_number(node: fx.Node) -> bool:
    """Whether it is the same to ``index_put`` which comes last of what it writes to a place."""
    values, *accumulates = node.args[2:]
    return not any(accumulates) and isinstance(values, fx.Node) and all(t.numel() == 1 for t in tensors_of(values))


def _may_divide_by_zero(node: fx.Node) -> bool:
    target: Any = node.target
    if target.overloadpacket not in _DIVIDES or not (isinstance(node.args[1], fx.Node) or node.args[1] == 0):
        return False
    return all(_is_integral(tensor) for tensor in tensors_of(node))  # a quotient that is a fraction is infinite


def is_exact(node: fx.Node) -> bool:
    """Whether every device computes the same bits."""
    target: Any = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return True
    packet = target.overloadpacket
    if packet in _MOVES_ELEMENTS:
        return True
    inputs = _tensors_given(node)
    if packet in _TYPES:
        # To a type with fewer numbers CPU and GPU round alike; what does not fit into an integer is another matter.
        return all(_is_integral(t) for t in tensors_of(node)) <= all(_is_integral(t) for t in inputs)
    return all(_is_integral(tensor) for tensor in [*inputs, *tensors_of(node)])


def _is_by_integers(node: fx.Node) -> bool:
    """Whether it is an index that gives as many elements whatever its numbers are."""
    return node.target is aten.index.Tensor and all(
        index is None or index.meta["val"].dtype not in (torch.bool, torch.uint8) for index in node.args[1]
    )


def indices_of(node: fx.Node) -> list[fx.Node]:
    """The inputs whose numbers say which elements it gives."""
    if not isinstance(node.target, torch._ops.OpOverload) or node.target.overloadpacket not in _LOOKS_UP:
        return []
    given = node.args[_LOOKS_UP[node.target.overloadpacket]]
    return [index for index in (given if isinstance(given, (list, tuple)) else [given]) if isinstance(index, fx.Node)]


def looks_up_within(node: fx.Node, value_of: Callable[[fx.Node], torch.Tensor | None]) -> bool:
    """Whether indices that are constants are known to be within the sizes of what they are looked up in.

    Constructors whose size is symbolic are not asked: what Inductor compiles for the CPU does not look at them either.

    Args:
        value_of: the tensor that a node gives in each call, None if it cannot be told.
    """
    looked_up: Any = node.args[0]
    given = node.args[1]  # an index of each dimension, a dimension, or an index of the first
    dim = given if isinstance(given, int) else 0
    places = enumerate(given) if isinstance(given, (list, tuple)) else ((dim, index) for index in indices_of(node))
    for place, index in places:
        size = looked_up.meta["val"].shape[place] if looked_up.meta["val"].dim() else 1
        for root in _roots(index) if isinstance(index, fx.Node) else []:
            value = value_of(root)
            if value is None and _is_counted(root):
                continue
            if value is None or not isinstance(size, int) or not _is_within(value, size):
                return False
    return True


def _is_counted(node: fx.Node) -> bool:
    """Whether it is computed of constructors alone."""
    seen, todo = {node}, [node]
    while todo:
        current = todo.pop()
        sources = [source for source in current.all_input_nodes if tensors_of(source)]
        if not (sources or is_constructor(current)):
            return False
        todo += [source for source in sources if source not in seen]
        seen.update(sources)
    return True


def _is_within(indices: torch.Tensor, size: int) -> bool:
    with unset_fake_temporarily():
        return not indices.numel() or -size <= int(indices.min()) <= int(indices.max()) < size


def _roots(node: fx.Node) -> list[fx.Node]:
    """What a value's elements are those of."""
    found, todo = [], [node]
    while todo:
        current = todo.pop()
        target: Any = current.target
        passes = isinstance(target, torch._ops.OpOverload) and target.overloadpacket in _PASSES_ELEMENTS
        todo += current.all_input_nodes if passes else []
        found += [] if passes else [current]
    return found


def held_tensor(node: fx.Node) -> torch.Tensor | None:
    """The plain tensor of the CPU that a ``get_attr`` node names, None where it is something else."""
    found: Any = node.graph.owning_module if node.op == "get_attr" else None
    for name in str(node.target).split(".") if found is not None else ():
        found = getattr(found, name, None)
    plain = type(found) in (torch.Tensor, torch.nn.Parameter) and found.device.type == "cpu"
    if not plain or found.layout != torch.strided:
        return None
    with unset_fake_temporarily(), torch.inference_mode(False):
        detached: torch.Tensor = found.detach()
        return detached


def _is_integral(tensor: torch.Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex())


def source_of(node: fx.Node) -> str | None:
    """The line of the user's code that it came from."""
    return source_line(node.meta.get("stack_trace"))


def cpu_inputs(node: fx.Node) -> Iterator[fx.Node]:
    """Those of its inputs that lie on the CPU, each once."""
    return (source for source in node.all_input_nodes if is_on_cpu(source))


def is_view(node: fx.Node) -> bool:
    """Whether what it gives may be the memory that it is given."""
    target = node.target
    if node.op != "call_function":
        return False
    if not isinstance(target, torch._ops.OpOverload):
        return True  # an item of several, or something that is not known
    return any(a.alias_info is not None for a in target._schema.arguments) or target in (
        aten._unsafe_view.default,
        aten.reshape.default,
        aten.contiguous.default,
    )


def is_a_whole(node: fx.Node) -> bool:
    """Whether memory of its elements alone can stand for its value: it is no view, or one without gaps of an input.

    The code that is generated finds a view in the memory of what it is a view of, by that one's strides. They are not
    those of what stands for it where it has gaps, and Inductor may leave gaps in what the CPU computes.
    """
    if not _shows_another(node):
        return True
    views = _views(node)
    return views[-1].op == "placeholder" and all(is_dense(t) for view in views for t in tensors_of(view))


def is_row_of_input(node: fx.Node) -> bool:
    """Whether it is a view without gaps of an input with some."""
    views = _views(node)
    return views[-1].op == "placeholder" and not is_a_whole(node) and all(map(is_dense, tensors_of(node)))


def _views(node: fx.Node) -> list[fx.Node]:
    """It, what it is a view of, what that is a view of, and so on; it ends at a view of several."""
    found = [node]
    while _shows_another(found[-1]):
        sources = [source for source in found[-1].all_input_nodes if tensors_of(source)]
        if len(sources) != 1:
            break
        found.append(sources[0])
    return found


def _shows_another(node: fx.Node) -> bool:
    """Whether it is a view; one of several values is where they are."""
    if is_view(node) and not isinstance(node.target, torch._ops.OpOverload) and len(node.all_input_nodes) == 1:
        return is_view(node.all_input_nodes[0])
    return is_view(node)


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether its elements lie side by side, each once, in some order; of symbolic sizes that is known of one order."""
    dims = [*zip(tensor.stride(), tensor.shape, strict=True)]
    if all(isinstance(number, int) for dim in dims for number in dim):
        dims.sort(reverse=True)
    expected: Any = 1
    for stride, size in reversed(dims):
        if statically_known_true(size == 1):
            continue
        if not statically_known_true(stride == expected):
            return False
        expected = expected * size
    return True
