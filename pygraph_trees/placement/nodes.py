"""Facts about a node of a post-grad graph: where its value is, and whether another device computes the same.

Each function takes an ``fx.Node`` with its value under "val" and changes nothing. A function named ``why_not_…``
returns the reason as text, or None. Operators are listed by name. An operator that no list contains counts as one that
may give another result on the GPU.
"""

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

# Operators that copy a tensor to another device, possibly to another type.
_COPIES = (aten._to_copy.default, prims.device_put.default, aten.to.device)

# The result consists of elements of the inputs, or of given numbers. It is the same on every device, for every type.
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
# Integers at equal distances, from a first one on.
_COUNTS = frozenset({aten.arange, prims.iota})
# If two zeros have different signs, the result depends on the device, and on the CPU on the position as well.
_CHOOSES_ZEROS = frozenset({aten.minimum, aten.maximum, aten.amax, aten.amin})
# The operator reads at indices that are among its inputs. An index out of bounds raises on the CPU, and the program
# goes on; on the GPU it ends all work of the process.
_LOOKS_UP = {aten.index: 1, aten.index_select: 2, aten.gather: 2, aten.embedding: 1, aten.index_put: 1}  # argument
# The result consists of elements of the inputs, whatever their values.
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
# IEEE 754 defines the result to the bit for single precision, if the GPU computes in double precision and rounds.
_COMPUTES = frozenset(
    {
        aten.add, aten.sub, aten.mul, aten.div, aten.reciprocal, aten.square, aten.fmod, aten.clamp,
        aten.clamp_min, aten.clamp_max, aten.ceil, aten.floor, aten.trunc, aten.round, aten.sign, aten.copysign,
    }
)  # fmt: skip
# In double precision these have an error of their own, which may reach the last place of the CPU's single-precision
# result. Measured: other functions differ by more, because the CPU's are less accurate. IEEE 754 defines a square root
# to the bit, but the CPU takes it from MKL, which does not follow it.
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
# For integers only, whose reductions are the same on every device; a floating-point sum depends on its order.
_REDUCES = frozenset(
    {
        aten.sum, aten.prod, aten.cumsum, aten.cumprod, aten.max, aten.min, aten.argmax, aten.argmin, aten.all,
        aten.any,
    }
)  # fmt: skip
_DIVIDES = frozenset({aten.div, aten.floor_divide, aten.remainder, aten.fmod})
_TYPES = frozenset({aten._to_copy, prims.convert_element_type})  # possibly to another device as well
_CLAMPS = frozenset({aten.clamp, aten.clamp_min, aten.clamp_max})
# These convert their scalars to the type of their tensors.
_TAKE_NUMBERS = frozenset(
    {
        aten.full, aten.full_like, aten.new_full, aten.scalar_tensor, aten.masked_fill, aten.where,
        aten.constant_pad_nd, aten.eq, aten.ne, aten.lt, aten.le, aten.gt, aten.ge,
    }
)  # fmt: skip
_CHOOSES = frozenset({aten.minimum, aten.maximum})
HALVES = frozenset({torch.float16, torch.bfloat16})


def tensors_of(node: fx.Node) -> list[torch.Tensor]:
    """The tensors in the node's value."""
    return [leaf for leaf in pytree.tree_leaves(node.meta.get("val")) if isinstance(leaf, torch.Tensor)]


def device_of(node: fx.Node) -> torch.device | None:
    """The device of the node's value; None if the value has no tensors or is on several devices."""
    devices = {tensor.device for tensor in tensors_of(node)}
    return devices.pop() if len(devices) == 1 else None


def is_on_cpu(node: fx.Node) -> bool:
    device = device_of(node)
    return device is not None and device.type == "cpu"


def is_on_gpu(node: fx.Node) -> bool:
    device = device_of(node)
    return device is not None and device.type == "cuda"


def nbytes_of(node: fx.Node) -> int | float:
    """The size of the node's tensors in bytes; infinity if a size is unknown."""
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
    """Whether the node copies a tensor to another device."""
    if node.op != "call_function" or node.target not in _COPIES or not node.args:
        return False
    source = node.args[0]
    return (
        isinstance(source, fx.Node)
        and None not in (device_of(source), device_of(node))
        and (device_of(source) != device_of(node))
    )


def is_constructor(node: fx.Node) -> bool:
    """Whether the node makes a tensor from numbers alone."""
    return (
        node.op == "call_function"
        and isinstance(node.target, torch._ops.OpOverload)
        and "device" in node.kwargs
        and not any(tensors_of(source) for source in node.all_input_nodes)
    )


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
        torch.Tag.dynamic_output_shape in target.tags and not _is_by_integers(node)
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
    if _may_divide_by_zero(node):
        return "it divides integers, and a division by zero is an error of the CPU's"
    if exact and not is_exact(node):
        return "its result may differ in the last place"
    return None


def fuses(node: fx.Node) -> bool:
    """Whether the GPU computes the node exactly, element by element, inside the kernel that reads it."""
    target: Any = node.target
    return target is operator.getitem or (
        target.overloadpacket not in _REDUCES and target.overloadpacket not in _LOOKS_UP and is_exact(node)
    )


def gives_unset_memory(node: fx.Node) -> bool:
    """Whether the node's elements are undefined until a program, or a file, sets them."""
    name = str(node.target)
    return any(part in name for part in ("empty", "resize", "from_file"))


def _is_known(node: fx.Node) -> bool:
    """Whether every device is known to give the same, or a neighbouring number if :func:`rounds_nearly`.

    Not known are matrix products (other precisions, or none for integers), sums of floating-point numbers, choices
    among equal elements or among several writes to one place, and decompositions.
    """
    target: Any = node.target
    if target is aten.index_put.default:
        return _writes_one_number(node)
    if target is aten.view.dtype and any(tensor.dtype in HALVES for tensor in _tensors_given(node)):
        return False  # a kernel holds them in single precision
    packet = target.overloadpacket
    types = {tensor.dtype for tensor in [*_tensors_given(node), *tensors_of(node)]}
    if packet in _MOVES_ELEMENTS:
        if packet in _CHOOSES_ZEROS and _may_choose_a_zero(node):
            return False
        # The absolute value of a complex number is a computation, and not every GPU has the other types.
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
    """Whether the given integers fit the types of the node's tensors; devices differ in what they make of others."""
    types = {tensor.dtype for tensor in [*_tensors_given(node), *tensors_of(node)]} - {torch.bool}
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


def _may_choose_a_zero(node: fx.Node) -> bool:
    """Whether the node may have to choose between two zeros with different signs."""
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
    """Whether the GPU finds the CPU's single-precision result if it computes in double precision and rounds."""
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
                return False  # the CPU first converts the number to single precision
        elif not (arg is None or isinstance(arg, float) or (isinstance(arg, int) and abs(arg) <= 1 << 24)):
            return False
    return {t.dtype for t in tensors_of(node)} == {torch.float32} and {t.dtype for t in _tensors_given(node)} <= _SINGLE


def _clamps_beside_zero(node: fx.Node) -> bool:
    """Whether no bound is zero: with such a bound, CPU and GPU may return zeros with different signs."""
    bounds = [bound for bound in (*node.args[1:], *node.kwargs.values()) if bound is not None]
    return all(isinstance(bound, (int, float)) and bound != 0 for bound in bounds)


def is_conversion(node: fx.Node) -> bool:
    """Whether the node gives its input's elements in another type."""
    target: Any = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return False
    return target.overloadpacket in _TYPES and [t.dtype for t in _tensors_given(node)] != [
        t.dtype for t in tensors_of(node)
    ]


def is_negation(node: fx.Node) -> bool:
    """Whether the node negates floating-point numbers: a GPU's compiler makes that ``0 - x``, which loses -0.0."""
    return node.target is aten.neg.default and node.meta["val"].is_floating_point()


def half_of(node: fx.Node) -> torch.dtype | None:
    """The half-precision type to which the node converts given numbers; None if there is none."""
    target: Any = node.target
    if not isinstance(target, torch._ops.OpOverload) or target.overloadpacket not in _TAKE_NUMBERS:
        return None
    types = {tensor.dtype for tensor in [*_tensors_given(node), *tensors_of(node)] if tensor.is_floating_point()}
    return types.pop() if len(types) == 1 and types <= HALVES else None


def mixes_with_half(node: fx.Node) -> bool:
    """Whether the node gives half-precision numbers and takes single-precision numbers or integers.

    On the GPU such a number is used unrounded in place of an element; the CPU rounds it when it stores the result.
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


def is_inverse_root(node: fx.Node) -> bool:
    """Whether the node is a power that a CPU computes as one over a square root, with other zeros and infinities."""
    return node.target is aten.pow.Tensor_Scalar and node.args[1] == -0.5


def takes_from_gpu(node: fx.Node) -> bool:
    """Whether the node writes a value that depends on the GPU to CPU memory, other than by a copy."""
    return node.op == "call_function" and is_on_cpu(node) and any(map(is_on_gpu, node.all_input_nodes))


def may_wait(node: fx.Node) -> bool:
    """Whether the call may wait for the GPU, copies apart; operators that can be captured do not wait."""
    target: Any = node.target
    if node.op != "call_function" or not any(is_on_gpu(n) for n in (node, *node.all_input_nodes)):
        return False
    if not isinstance(target, torch._ops.OpOverload):
        return not (str(target) == "<built-in function getitem>" or "triton_kernel" in str(target))
    needs_numbers = torch.Tag.data_dependent_output in target.tags or torch.Tag.dynamic_output_shape in target.tags
    return (needs_numbers and not _is_by_integers(node)) or torch.Tag.cudagraph_unsafe in target.tags


def rounds_nearly(node: fx.Node) -> bool:
    """Whether the node's last place may differ, so that only its elements may be used further."""
    target: Any = node.target
    if not isinstance(target, torch._ops.OpOverload) or all(_is_integral(tensor) for tensor in tensors_of(node)):
        return False
    return target.overloadpacket in _COMPUTES_NEARLY or not (is_constructor(node) or _is_known(node))


def keeps_elements(node: fx.Node) -> bool:
    """Whether the node gives only elements of its inputs, or numbers that it takes."""
    target: Any = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return True  # one item of several
    return target.overloadpacket in _MOVES_ELEMENTS - _COMPARES


# The CPU computes in single precision with these types, and converts them to it first.
_SINGLE = frozenset({torch.float32, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool})
_NUMBERS = _SINGLE | {torch.float64, torch.float16, torch.bfloat16}
_COMPLEX = frozenset({torch.complex64, torch.complex128})


def _tensors_given(node: fx.Node) -> list[torch.Tensor]:
    return [tensor for source in node.all_input_nodes for tensor in tensors_of(source)]


def _converts_alike(node: fx.Node) -> bool:
    """Whether devices convert alike: all round alike, but they differ in numbers that do not fit an integer type."""
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
    """Whether all writes to one place carry the same number, so that the order of ``index_put`` does not matter."""
    values, *accumulates = node.args[2:]
    return not any(accumulates) and isinstance(values, fx.Node) and all(t.numel() == 1 for t in tensors_of(values))


def _may_divide_by_zero(node: fx.Node) -> bool:
    target: Any = node.target
    if target.overloadpacket not in _DIVIDES or not (isinstance(node.args[1], fx.Node) or node.args[1] == 0):
        return False
    return all(_is_integral(tensor) for tensor in tensors_of(node))  # a fractional quotient becomes infinite instead


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
        # CPU and GPU round alike when they narrow a type, but not when a number does not fit an integer type.
        return all(_is_integral(t) for t in tensors_of(node)) <= all(_is_integral(t) for t in inputs)
    return all(_is_integral(tensor) for tensor in [*inputs, *tensors_of(node)])


def _is_by_integers(node: fx.Node) -> bool:
    """Whether the node is an index whose number of elements does not depend on the values."""
    return node.target is aten.index.Tensor and all(
        index is None or index.meta["val"].dtype not in (torch.bool, torch.uint8) for index in node.args[1]
    )


def indices_of(node: fx.Node) -> list[fx.Node]:
    """The inputs whose numbers select the node's elements."""
    if not isinstance(node.target, torch._ops.OpOverload) or node.target.overloadpacket not in _LOOKS_UP:
        return []
    given = node.args[_LOOKS_UP[node.target.overloadpacket]]
    return [index for index in (given if isinstance(given, (list, tuple)) else [given]) if isinstance(index, fx.Node)]


def looks_up_within(node: fx.Node, value_of: Callable[[fx.Node], torch.Tensor | None]) -> bool:
    """Whether constant indices are known to be within the size of the dimension that they index.

    A constructor of symbolic size is not checked: Inductor's code for the CPU does not check it either.

    Args:
        value_of: the tensor that a node gives in every call, None if it is unknown.
    """
    looked_up: Any = node.args[0]
    given = node.args[1]  # one index per dimension, or a dimension, or the index into the first dimension
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
    """Whether the node depends on constructors alone."""
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
    """The nodes whose elements a value consists of."""
    found, todo = [], [node]
    while todo:
        current = todo.pop()
        target: Any = current.target
        passes = isinstance(target, torch._ops.OpOverload) and target.overloadpacket in _PASSES_ELEMENTS
        todo += current.all_input_nodes if passes else []
        found += [] if passes else [current]
    return found


def held_tensor(node: fx.Node) -> torch.Tensor | None:
    """The plain CPU tensor that a ``get_attr`` node names; None if it names anything else."""
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
    """The line of the user's code that the node comes from."""
    return source_line(node.meta.get("stack_trace"))


def cpu_inputs(node: fx.Node) -> Iterator[fx.Node]:
    """The node's inputs that are on the CPU, each once."""
    return (source for source in node.all_input_nodes if is_on_cpu(source))


def is_view(node: fx.Node) -> bool:
    """Whether the node's value may share memory with an input."""
    target = node.target
    if node.op != "call_function":
        return False
    if not isinstance(target, torch._ops.OpOverload):
        return True  # one item of several, or an unknown function
    return any(a.alias_info is not None for a in target._schema.arguments) or target in (
        aten._unsafe_view.default,
        aten.reshape.default,
        aten.contiguous.default,
    )


def is_a_whole(node: fx.Node) -> bool:
    """Whether a dense copy can stand for the value: it is no view, or a dense view of a dense input.

    Generated code finds a view inside the memory of its base, by the base's strides. A dense copy of a base with gaps
    has other strides, and Inductor may leave gaps in what the CPU computes.
    """
    if not _shows_another(node):
        return True
    views = _views(node)
    return views[-1].op == "placeholder" and all(is_dense(t) for view in views for t in tensors_of(view))


def is_row_of_input(node: fx.Node) -> bool:
    """Whether the node is a dense view of an input with gaps."""
    views = _views(node)
    return views[-1].op == "placeholder" and not is_a_whole(node) and all(map(is_dense, tensors_of(node)))


def _views(node: fx.Node) -> list[fx.Node]:
    """The node, its base, the base of that and so on, up to the first view of several tensors."""
    found = [node]
    while _shows_another(found[-1]):
        sources = [source for source in found[-1].all_input_nodes if tensors_of(source)]
        if len(sources) != 1:
            break
        found.append(sources[0])
    return found


def _shows_another(node: fx.Node) -> bool:
    """Whether the node is a view; one item of several is a view if the node that gives them is."""
    if is_view(node) and not isinstance(node.target, torch._ops.OpOverload) and len(node.all_input_nodes) == 1:
        return is_view(node.all_input_nodes[0])
    return is_view(node)


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements fill their memory without gaps, each once; for symbolic sizes, only in the given order."""
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
