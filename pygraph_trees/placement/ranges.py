"""Bounds the elements of a node's value, as far as a few simple operators allow.

:func:`largest` returns a bound on the absolute values of all elements, or infinity if none is known or if an element
may be infinite or NaN. :func:`fits_integers` asks whether all elements fit an integer type. Only then does a conversion
to that type give the same result on every device: processors convert other numbers differently.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from .nodes import REARRANGES, aten, prims

_KEEPS = REARRANGES | {aten.roll, aten.tril, aten.triu, aten.neg, aten.abs, aten.trunc}
_CONVERTS = frozenset({aten._to_copy, prims.convert_element_type})
_ROUNDS = frozenset({aten.ceil, aten.floor, aten.round})
_MOST_NODES = 64  # visited for one bound
_ROUNDING = 1 + 2.0**-7  # no type rounds up by more


def fits_integers(node: fx.Node, dtype: torch.dtype) -> bool:
    """Whether all elements of a value, truncated, fit a signed integer type."""
    return dtype in (torch.int8, torch.int16, torch.int32, torch.int64) and largest(node) < torch.iinfo(dtype).max


def largest(node: fx.Node) -> float:
    """A bound on the absolute values of a tensor's elements."""
    return _Bounds().of(node)


class _Bounds:
    def __init__(self) -> None:
        self._found: dict[fx.Node, float] = {}

    def of(self, node: fx.Node) -> float:
        if node not in self._found:
            self._found[node] = math.inf  # until the bound is known, or if the limit is reached
            if len(self._found) <= _MOST_NODES:
                self._found[node] = self._stored(node, self._computed(node))
        return self._found[node]

    def _stored(self, node: fx.Node, bound: float) -> float:
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor) or value.is_complex():
            return math.inf
        if value.dtype == torch.bool:
            return 1.0
        if not value.is_floating_point():
            info = torch.iinfo(value.dtype)
            return float(max(info.max, -info.min))  # wrapped-around numbers included
        bound *= _ROUNDING
        return bound if bound <= torch.finfo(value.dtype).max else math.inf

    def _computed(self, node: fx.Node) -> float:
        """The bound before the value is rounded to its type."""
        target: Any = node.target
        packet = getattr(target, "overloadpacket", None)
        if node.op != "call_function" or node.kwargs.get("alpha", 1) != 1 or "rounding_mode" in node.kwargs:
            return math.inf
        if packet is aten.full:
            return self._number(node.args[1])
        if packet in _KEEPS | _CONVERTS:
            return self._number(node.args[0])
        if packet in _ROUNDS:
            return self._number(node.args[0]) + 1
        if packet in (aten.add, aten.sub):
            return self._number(node.args[0]) + self._number(node.args[1])
        if packet is aten.mul:
            bounds = self._number(node.args[0]), self._number(node.args[1])
            return math.inf if math.inf in bounds else bounds[0] * bounds[1]
        if packet is aten.div and isinstance(node.args[1], (int, float)) and abs(node.args[1]) >= 1e-30:
            return self._number(node.args[0]) / abs(node.args[1])
        return math.inf

    def _number(self, value: Any) -> float:
        if isinstance(value, fx.Node):
            return self.of(value)
        return abs(value) if isinstance(value, (int, float)) and math.isfinite(value) else math.inf
