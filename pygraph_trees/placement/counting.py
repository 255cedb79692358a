"""Integers that a kernel computes from its index instead of loading them, and where they differ from the CPU's.

Inductor merges ``iota`` and the arithmetic on it into one expression, which a kernel computes with its 32-bit index,
and drops the conversions in between. :meth:`Counting.why_not_counted` bounds the numbers and checks whether they fit 32
bits and the types of the nodes. Numbers without a known bound do not fit. ``ranges.py`` bounds fractions, for
conversions.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from .lookups import LOOKUPS
from .nodes import REARRANGES, aten, prims, tensors_given, tensors_of

_COUNTS = frozenset({aten.arange, prims.iota})
_CONVERTS = frozenset({aten._to_copy, prims.convert_element_type})
# Kernels count their results as they count the first input: with another index.
_KEEPS = (
    REARRANGES
    | (LOOKUPS.keys() - {aten.index_put})
    | {
        aten.view, aten.diagonal, aten.unfold, aten.split, aten.split_with_sizes, aten.unbind, prims.view_of,
        prims.rev, prims.device_put,
    }
)  # fmt: skip
# What Inductor puts into one expression.
_COMPUTES = frozenset(
    {
        aten.add, aten.sub, aten.rsub, aten.mul, aten.square, aten.neg, aten.abs, aten.remainder, aten.fmod,
        aten.floor_divide, aten.div, aten.pow, aten.minimum, aten.maximum, aten.clamp, aten.clamp_min, aten.clamp_max,
        aten.relu, aten.sign, aten.bitwise_not,
    }
)  # fmt: skip
_REDUCES = frozenset({aten.sum, aten.prod, aten.amax, aten.amin})  # the same, over a few elements
# Assumed if a number is known only at the call: it is a size or a position, and no program makes more elements on
# the CPU at each call. Torch itself assumes the same of the values that it moves.
_MOST_ELEMENTS, _MOST_SYMBOLIC = 1 << 24, 1 << 30
# The integers that a floating-point type holds without a gap.
_MOST = {torch.float16: 1 << 11, torch.bfloat16: 1 << 8, torch.float32: 1 << 24, torch.float64: 1 << 53}
_UNKNOWN = (-math.inf, math.inf)

Interval = tuple[float, float]


class Counting:
    """The intervals of the nodes of one graph, by node; None for a node whose elements a kernel loads."""

    def __init__(self) -> None:
        self._found: dict[fx.Node, Interval | None] = {}

    def why_not_counted(self, node: fx.Node) -> str | None:
        """Why a kernel would compute other numbers than the CPU; None if it loads them or computes the same."""
        todo = [node]
        while todo:  # inputs first
            current = todo[-1]
            missing = [source for source in current.all_input_nodes if source not in self._found]
            if current in self._found or not missing:
                self._found.setdefault(current, self._of(current))
                todo.pop()
            else:
                todo += missing
        interval = self._found[node]
        if interval is None or all(_fits(interval, tensor.dtype) for tensor in tensors_of(node)):
            return None
        return "a kernel would compute it with 32 bits, or without a conversion"

    def loses_rounding(self, node: fx.Node, dtype: torch.dtype) -> bool:
        """Whether a kernel that converts a value to a type would keep numbers that the type cannot hold.

        Inductor drops the conversion of what a kernel counts, of a number that fills a tensor, and of sums of what a
        kernel counts, in floating point as well.
        """
        self.why_not_counted(node)
        found = self._found[node] or _filled_with(node) or self._added(node)
        return found is not None and not _fits(found, dtype)

    def _added(self, node: fx.Node) -> Interval | None:
        """The numbers of a floating-point sum or difference of two counted values; None for any other node."""
        packet = getattr(node.target, "overloadpacket", None)
        if packet not in (aten.add, aten.sub) or not all(isinstance(term, fx.Node) for term in node.args[:2]):
            return None
        counts = all(self._found[term] is not None for term in node.args[:2])
        return self._computed(packet, node) if counts else None

    def _of(self, node: fx.Node) -> Interval | None:
        target: Any = node.target
        packet = getattr(target, "overloadpacket", None)
        if packet in _COUNTS:
            return _counted(node)
        if _keeps(node):
            return self._found[node.all_input_nodes[0]]
        sources = node.all_input_nodes
        known = packet in _CONVERTS | _COMPUTES or (packet in _REDUCES and _is_written_out(node))
        if not known or all(self._found[source] is None and not _is_symbolic(source) for source in sources):
            return None
        if any(self._found[s] is None and _filled_with(s) is None for s in sources if tensors_of(s)):
            # A loaded operand ends the expression; the numbers of the other operands are computed before it, and so is
            # a counted operand's product with `alpha`.
            return None if node.kwargs.get("alpha", 1) == 1 else _UNKNOWN
        if packet in _CONVERTS:
            # A number that does not fit the type becomes another number for the next node.
            found = self._found[sources[0]]
            return found if found is not None and all(_fits(found, t.dtype) for t in tensors_of(node)) else _UNKNOWN
        if any(tensor.is_floating_point() for tensor in [*tensors_given(node), *tensors_of(node)]):
            return None
        return self._computed(packet, node)

    def _computed(self, packet: Any, node: fx.Node) -> Interval:
        numbers = [arg for arg in (*node.args, *node.kwargs.values()) if isinstance(arg, int)]
        if not all(_fits((number, number), tensor.dtype) for number in numbers for tensor in tensors_of(node)):
            return _UNKNOWN  # a kernel has them as they are, in 32 bits
        if packet in (aten.clamp, aten.clamp_min, aten.clamp_max):
            return self._clamped(packet, node)
        given = [self._interval(arg) for arg in node.args[:2]]
        if node.kwargs.get("alpha", 1) != 1 or any(interval == _UNKNOWN for interval in given):
            return _UNKNOWN
        first = given[0]
        if packet is aten.neg:
            return -first[1], -first[0]
        if packet is aten.square:
            return _hull(bound * bound for bound in (*first, 0.0))
        if len(given) < 2:
            return _UNKNOWN
        second = given[1]
        if packet is aten.add:
            return first[0] + second[0], first[1] + second[1]
        if packet is aten.sub:
            return first[0] - second[1], first[1] - second[0]
        if packet is aten.rsub:
            return second[0] - first[1], second[1] - first[0]
        if packet is aten.mul:
            return _hull(one * other for one in first for other in second)
        divides = packet is aten.floor_divide or (packet is aten.div and node.kwargs.get("rounding_mode") == "floor")
        if divides and second[0] == second[1] > 0:
            return first[0] // second[0], first[1] // second[0]
        if packet is aten.remainder and second[0] == second[1] > 0:
            return 0.0, second[0] - 1
        return _UNKNOWN

    def _clamped(self, packet: Any, node: fx.Node) -> Interval:
        names = {aten.clamp: ("min", "max"), aten.clamp_min: ("min",), aten.clamp_max: ("max",)}[packet]
        bounds = dict(zip(names, node.args[1:], strict=False)) | dict(node.kwargs)
        low, high = self._interval(node.args[0])
        if (low, high) == _UNKNOWN or any(b is not None and _given(b) == _UNKNOWN for b in bounds.values()):
            return _UNKNOWN
        least, most = bounds.get("min"), bounds.get("max")
        low, high = (low, high) if least is None else (max(low, least), max(high, least))
        return (low, high) if most is None else (min(low, most), min(high, most))

    def _interval(self, value: Any) -> Interval:
        if not isinstance(value, fx.Node) or not tensors_of(value):
            return _given(value)
        found = self._found.get(value) or _filled_with(value)
        fits = found is not None and all(_fits(found, tensor.dtype) for tensor in tensors_of(value))
        return found if found is not None and fits else _UNKNOWN


def _is_written_out(node: fx.Node) -> bool:
    """Whether Inductor puts all that a reduction reads for an element into the expression."""
    from torch._inductor import config

    (given,), (left,) = tensors_given(node), tensors_of(node)
    return statically_known_true(given.numel() <= (config.unroll_reductions_threshold - 1) * left.numel())


def _keeps(node: fx.Node) -> bool:
    return node.target is operator.getitem or getattr(node.target, "overloadpacket", None) in _KEEPS


def _filled_with(node: fx.Node) -> Interval | None:
    """The integer that all elements have, which Inductor puts into the expression; None if they are loaded."""
    number = _number_in(node)
    return None if number is None or isinstance(number, float) else _given(number)


def _is_symbolic(node: fx.Node) -> bool:
    """Whether a node is an integer that is known only at the call, or a tensor filled with one."""
    number = _number_in(node) if tensors_of(node) else node
    return isinstance(number, fx.Node) and isinstance(number.meta.get("val"), torch.SymInt)


def _number_in(node: fx.Node) -> Any:
    """The number that fills a tensor; None for any other tensor."""
    while _keeps(node):
        node = node.all_input_nodes[0]
    position = {aten.full.default: 1, aten.scalar_tensor.default: 0}.get(node.target)
    return None if position is None else node.args[position]


def _given(value: Any) -> Interval:
    """The interval of a number among the arguments."""
    if isinstance(value, fx.Node) and isinstance(value.meta.get("val"), torch.SymInt):
        return -float(_MOST_SYMBOLIC), float(_MOST_SYMBOLIC)
    return (float(value), float(value)) if isinstance(value, int) else _UNKNOWN


def _counted(node: fx.Node) -> Interval:
    """The least and the greatest number of ``iota`` or ``arange``."""
    (tensor,) = tensors_of(node)
    target: Any = node.target
    if target is prims.iota.default:
        start, step = node.kwargs.get("start"), node.kwargs.get("step")
    else:
        start, step = (0, 1) if len(node.args) == 1 else (node.args[0], node.args[2] if len(node.args) > 2 else 1)
    count = tensor.shape[0] if isinstance(tensor.shape[0], int) else _MOST_ELEMENTS
    if not isinstance(step, int):
        return _UNKNOWN
    starts = _given(start)
    return _hull((*starts, *(bound + step * max(0, count - 1) for bound in starts)))


def _hull(values: Iterable[float]) -> Interval:
    known = list(values)
    return min(known), max(known)


def _fits(interval: Interval, dtype: torch.dtype) -> bool:
    least, most = interval
    if dtype == torch.bool or dtype.is_complex:
        return False
    if dtype.is_floating_point:
        limit = min(_MOST.get(dtype, 0), 1 << 31)
        return -limit <= least and most <= limit
    info = torch.iinfo(dtype)
    return max(info.min, -(1 << 31)) <= least and most <= min(info.max, (1 << 31) - 1)
