"""Decides, for each CPU value that the GPU needs, how the GPU gets it.

:class:`Plan` takes a post-grad graph and answers with a :class:`How`: made on the GPU, kept there, a constant, folded,
or copied, with the reason for each copy. A value that depends on constants alone keeps the bits that the CPU computes.
Only values that depend on inputs may differ in the last place. README.md gives the order of the choices.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum

import torch
from torch import fx

from pygraph_trees.report import records

from .counting import Counting
from .folding import Folding
from .lookups import indices_of, looks_up_within
from .nodes import (
    aten,
    cpu_inputs,
    is_constructor,
    is_copy_between_devices,
    is_narrow,
    is_on_cpu,
    is_on_gpu,
    is_view,
    nbytes_of,
    source_of,
    tensors_of,
)
from .operators import fuses, keeps_elements, rounds_nearly, why_not_elsewhere

_WRITES = (aten.index_put.default, aten.index_put_.default)
_INDEX = (*_WRITES, aten.index.Tensor, aten.copy.default, aten.slice_scatter.default, aten._unsafe_index.Tensor)

# A larger value is copied outside of the CUDA graph, once to pinned memory and once to the GPU. Upstream copies pinned
# memory only once; at about this size, the additional copy takes as long as splitting the graph (measured: 98 us
# against 80 a call for 4 KiB; the host copies 12 to 16 GB/s).
MOST_STAGED_NBYTES = 320 << 10
# Inputs up to this size are copied in place of a smaller value that depends on them: the transfer takes about as long
# as the shortest one, and copying the value would be a transfer as well.
MOST_NBYTES = 64 << 10


class How(Enum):
    """How the GPU gets the value of a CPU node."""

    MADE = "made on the GPU"  # by the same call
    KEPT = "taken where it came from"  # the CPU value is a copy of a GPU value
    CONSTANT = "a constant on the GPU"
    FOLDED = "computed once, a constant on the GPU"  # at compile time
    COPIED = "copied"  # at each call
    STAGED = "staged"  # copied at each call by the CUDA graph itself


@dataclass(frozen=True, slots=True)
class Value:
    """A CPU value that the GPU needs."""

    node: str
    how: How
    why: str | None  # why the CPU still computes it, or why it is copied at each call; None for a move
    source: str | None  # a line of the user's code

    @staticmethod
    def of(node: fx.Node, how: How, why: str | None = None) -> Value:
        return Value(node.name, how, why, source_of(node))


@dataclass(slots=True)
class Placed:
    """The result of placement for one graph."""

    moves: list[Value] = field(default_factory=list)  # for which the GPU no longer waits for the CPU
    stays: list[Value] = field(default_factory=list)
    why_not: str | None = None  # set if the graph was left alone

    def records(self) -> Iterator[records.Placed]:
        """The records of the report."""
        for value in (*self.moves, *self.stays):
            yield records.Placed(value.node, value.how.value, value.why, value.source)


class Plan:
    """Decides for CPU values and everything they depend on."""

    def __init__(self, graph: fx.Graph, *, exact: bool, folds: bool = True) -> None:
        self._exact, self._folds = exact, folds
        self.folding = Folding(graph)
        self._counting = Counting()
        self._fusing: dict[fx.Node, bool] = {}  # of a constant and everything it depends on
        self._rounded: set[fx.Node] = set()  # made on the GPU, and may differ in the last place
        self._of_gpu: set[fx.Node] = set()  # depends on GPU values
        self._how: dict[fx.Node, How] = {}
        self.why: dict[fx.Node, str] = {}  # of copied values
        self._leaves: dict[fx.Node, frozenset[fx.Node]] = {}  # the values that each value needs copied

    def how(self, node: fx.Node) -> How:
        """The decision for a CPU value that the GPU needs. The rewrite makes STAGED of COPIED if it can."""
        todo = [node]
        while todo:
            current = todo[-1]
            if current in self._how:
                todo.pop()
                continue
            first = self._without_inputs(current)
            if first is not None:
                self._set(current, first, frozenset([current]) if first is How.COPIED else frozenset())
                continue
            missing = [source for source in cpu_inputs(current) if source not in self._how]
            if missing:
                todo += missing
                continue
            self._decide(current)
        return self._how[node]

    def _without_inputs(self, node: fx.Node) -> How | None:
        if node.op == "get_attr" or (node.target is aten.lift_fresh_copy.default and node.args[0].op == "get_attr"):
            if not self.folding.loses_bits(node):
                return How.CONSTANT
            if self._folds and self.folding.why_not(node) is None:
                return How.FOLDED
            self.why[node] = "its value would lose bits as literals in a kernel"
            return How.COPIED
        if node.op == "placeholder":
            self.why[node] = "it is an input"
            return How.COPIED
        if is_copy_between_devices(node) and is_on_gpu(node.args[0]):
            value, why = node.meta["val"], self._counting.why_not_counted(node)
            if node.args[0].op != "placeholder" and value.dtype != torch.bool and is_narrow(value):
                why = "a kernel may hold it in more bits than its type has"
            if why is None:
                return How.KEPT
            self.why[node] = why
            return How.COPIED
        why = why_not_elsewhere(node, exact=self._exact)
        if why is None and not _shares_memory(node):  # a view has the numbers of its base
            why = self._counting.why_not_counted(node)
        if node in self.folding.constants:
            if why is None and rounds_nearly(node):
                why = "its last place may differ"
            if not (why is None and (self._fuses(node) or _shares_memory(node))):
                why_not_folded = self.folding.why_not(node) if self._folds else "it is in a branch or a loop"
                if why_not_folded is None:
                    return How.FOLDED
                why = why and f"{why}, and {why_not_folded}"
        if is_constructor(node) and why is None:
            return How.MADE
        if why is None and any(not is_on_cpu(source) for source in node.all_input_nodes if tensors_of(source)):
            why = "it is computed of values of several devices"
        if why is not None:
            self.why[node] = why
            return How.COPIED
        return None

    def _fuses(self, node: fx.Node) -> bool:
        """Whether the GPU computes a constant and everything it depends on inside the kernel that reads it."""
        todo = [node]
        while todo:
            current = todo[-1]
            if current in self._fusing:
                todo.pop()
                continue
            sources = [source for source in current.all_input_nodes if tensors_of(source)]
            missing = [source for source in sources if source not in self._fusing]
            if missing:
                todo += missing
            elif current.op == "get_attr" or current.target is aten.lift_fresh_copy.default:
                self._fusing[current] = True
            else:
                alike = why_not_elsewhere(current, exact=True) is None and fuses(current)
                alike = alike and self._counting.why_not_counted(current) is None
                self._fusing[current] = alike and all(self._fusing[source] for source in sources)
        return self._fusing[node]

    def _decide(self, node: fx.Node) -> None:
        leaves = frozenset().union(*(self._leaves[source] for source in cpu_inputs(node)))
        stuck = next((leaf for leaf in leaves if leaf.op != "placeholder"), None)
        nbytes = sum(nbytes_of(leaf) for leaf in leaves)
        rounded = next((source for source in cpu_inputs(node) if source in self._rounded), None)
        if stuck is not None:
            self.why[node] = f"it is computed of {stuck.name}: {self.why[stuck]}"
        elif any(self._leaves.get(index) or index in self._of_gpu for index in indices_of(node)):
            self.why[node] = "it looks up what inputs say, and an index that is out of bounds is an error of the CPU's"
        elif indices_of(node) and not looks_up_within(node, self.folding.value):
            self.why[node] = (
                "it looks up what may not be there, and an index that is out of bounds is an error of the CPU's"
            )
        elif rounded is not None and not keeps_elements(node):
            self.why[node] = f"it is computed of {rounded.name}, whose last place may differ"
        elif nbytes > MOST_NBYTES and nbytes > nbytes_of(node):
            self.why[node] = f"what it is computed of is larger: {nbytes} bytes"
        else:
            self._set(node, How.MADE, leaves)
            return
        self._set(node, How.COPIED, frozenset([node]))

    def _set(self, node: fx.Node, how: How, leaves: frozenset[fx.Node]) -> None:
        self._how[node] = how
        self._leaves[node] = leaves
        if how is How.KEPT or (how is How.MADE and any(source in self._of_gpu for source in cpu_inputs(node))):
            self._of_gpu.add(node)
        if how is How.MADE and (rounds_nearly(node) or any(source in self._rounded for source in cpu_inputs(node))):
            self._rounded.add(node)


def _shares_memory(node: fx.Node) -> bool:
    """Whether the node is a view, so that one constant serves the view and its base."""
    return isinstance(node.target, torch._ops.OpOverload) and is_view(node)


def needs(node: fx.Node) -> list[fx.Node]:
    """The CPU values that a GPU node reads and may find on either device."""
    if node.op != "call_function" or not is_on_gpu(node):
        return []
    return [source for source in cpu_inputs(node) if may_be_anywhere(node, source)]


def may_be_anywhere(node: fx.Node, source: fx.Node) -> bool:
    """Whether a GPU operator does the same with a value on the CPU and with one on the GPU.

    True for a scalar tensor in a pointwise operator, and for indices. Other operators may require it on the CPU, as
    does a write of one number under a mask, for which torch would otherwise wait for the GPU.
    """
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or target.namespace not in ("aten", "prims"):
        return False
    if target in _WRITES and source is node.args[2]:
        masks = [index for index in node.args[1] if isinstance(index, fx.Node)]
        return all(mask.meta["val"].dtype not in (torch.bool, torch.uint8, torch.int8) for mask in masks)
    if target in _INDEX:
        return True
    return torch.Tag.pointwise in target.tags and source.meta["val"].dim() == 0
