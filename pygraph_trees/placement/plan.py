"""Decides, for each CPU value that the GPU needs, how the GPU gets it.

:func:`planned` takes a post-grad graph and answers with a :class:`Value` for each of them: made on the GPU, kept there,
a constant, folded, staged, or copied outside of the CUDA graph, with the reason for each copy. A value that depends on
constants alone keeps the bits that the CPU computes. Only values that depend on inputs may differ in the last place.
README.md gives the order of the choices.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum

import torch
from torch import fx

from pygraph_trees.cuda.host_reads import HostRead
from pygraph_trees.report import records

from .folding import Folding
from .lookups import indices_of, looks_up_within
from .nodes import (
    aten,
    cpu_inputs,
    is_constructor,
    is_copy_between_devices,
    is_integral,
    is_on_cpu,
    is_on_gpu,
    is_row_of_input,
    is_view,
    nbytes_of,
    source_of,
    tensors_of,
)
from .operators import Error, error_of, is_elementwise, keeps_memory, why_not_elsewhere
from .readers import needs, waits_for_stream, when_read

# A larger value is copied outside of the CUDA graph, once to pinned memory and once to the GPU. Upstream copies pinned
# memory only once; at about this size, the additional copy takes as long as splitting the graph (measured: 98 us
# against 80 a call for 4 KiB; the host copies 12 to 16 GB/s).
MOST_STAGED_NBYTES = 320 << 10
# Inputs up to this size are copied in place of a smaller value that depends on them: the transfer takes about as long
# as the shortest one, and copying the value would be a transfer as well.
MOST_NBYTES = 64 << 10
_NARROW = frozenset({torch.int8, torch.uint8, torch.int16, torch.uint16})


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

    node: fx.Node
    how: How
    why: str | None = None  # why it is copied at each call; None if it is not
    read: HostRead | None = None  # when the program reads a staged value


@dataclass(slots=True)
class Placed:
    """The result of placement for one graph."""

    moves: list[Value] = field(default_factory=list)  # for which the GPU no longer waits for the CPU
    stays: list[Value] = field(default_factory=list)
    why_not: str | None = None  # set if the graph was left alone

    def records(self) -> Iterator[records.Placed]:
        """The records of the report."""
        for value in (*self.moves, *self.stays):
            yield records.Placed(value.node.name, value.how.value, value.why, source_of(value.node))


def planned(graph: fx.Graph, folding: Folding, *, exact: bool, stages: bool) -> dict[fx.Node, Value]:
    """The decisions for all CPU values that the GPU needs and everything they depend on.

    Args:
        folding: computes constants; its ``folds`` says whether the graph may have new ones.
        exact: leave floating-point computations, whose results may differ in the last place, to the CPU.
        stages: whether the CUDA graph itself may make the copies of each call.
    """
    plan = _Plan(graph, folding, exact=exact, stages=stages)
    for node in graph.nodes:
        for source in needs(node):
            plan.decide(source)
    return plan.values


class _Plan:
    def __init__(self, graph: fx.Graph, folding: Folding, *, exact: bool, stages: bool) -> None:
        self._folding, self._exact, self._stages = folding, exact, stages
        self._waits = any(map(waits_for_stream, graph.nodes))
        self.values: dict[fx.Node, Value] = {}
        self._errors: dict[fx.Node, Error] = {}  # of values made on the GPU
        self._leaves: dict[fx.Node, frozenset[fx.Node]] = {}  # the values that each value needs copied or kept

    def decide(self, node: fx.Node) -> None:
        """Decides for a value and, if that depends on its inputs, for these first."""
        todo = [node]
        while todo:
            current = todo[-1]
            if current in self.values:
                todo.pop()
                continue
            value = self._without_inputs(current)
            missing = [] if value else [source for source in cpu_inputs(current) if source not in self.values]
            if missing:
                todo += missing
                continue
            value = value or self._from_inputs(current)
            self.values[current] = value
            if value.how is not How.MADE:
                is_leaf = value.how in (How.COPIED, How.STAGED, How.KEPT)
                self._leaves[current] = frozenset([current] if is_leaf else [])

    def _without_inputs(self, node: fx.Node) -> Value | None:
        """The decision for a node if it is the same for all decisions for its inputs."""
        if node.op == "get_attr":
            if not self._folding.loses_bits(node):
                return Value(node, How.CONSTANT)
            return self._folded_or_copied(node, "its value would lose bits as literals in a kernel")
        if node.op == "placeholder":
            return self._copied(node, "it is an input")
        if is_copy_between_devices(node) and is_on_gpu(node.args[0]):
            if node.args[0].op != "placeholder" and node.meta["val"].dtype in _NARROW:
                return self._copied(node, "a kernel may hold it in more bits than its type has")
            return Value(node, How.KEPT)
        is_constant = node in self._folding.constants
        why = why_not_elsewhere(node, exact=self._exact or is_constant)
        if why is None and any(not is_on_cpu(source) for source in node.all_input_nodes if tensors_of(source)):
            why = "it is computed from values of several devices"
        if why is None:
            return None
        return self._folded_or_copied(node, why) if is_constant else self._copied(node, why)

    def _from_inputs(self, node: fx.Node) -> Value:
        sources = list(cpu_inputs(node))
        fuses = is_elementwise(node) and all(self.values[s].how in (How.MADE, How.CONSTANT) for s in sources)
        folds = node in self._folding.constants and not (fuses or _shows_constant(node))
        if folds and self._folding.why_not(node) is None:
            return Value(node, How.FOLDED)
        leaves = frozenset().union(*(self._leaves[source] for source in sources))
        copied = [leaf for leaf in leaves if self.values[leaf].how is not How.KEPT]
        stuck = next((leaf for leaf in copied if leaf.op != "placeholder"), None)
        nbytes = sum(map(nbytes_of, copied))
        inexact = max(sources, key=lambda source: self._errors.get(source, Error.NONE), default=node)
        error = error_of(node, self._errors.get(inexact, Error.NONE))
        why = None
        if stuck is not None:
            why = f"it is computed from {stuck.name}: {self.values[stuck].why}"
        elif any(self._leaves[index] for index in indices_of(node)):
            why = "it looks up what inputs say, and an index that is out of bounds is an error of the CPU's"
        elif indices_of(node) and not looks_up_within(node, self._folding.value):
            why = "it looks up what may not be there, and an index that is out of bounds is an error of the CPU's"
        elif error is None:
            why = f"it is computed from {inexact.name}, whose last place may differ"
        elif nbytes > MOST_NBYTES and nbytes > nbytes_of(node):
            why = f"what it is computed from is larger: {nbytes} bytes"
        if why is not None or error is None:
            return self._copied(node, str(why))
        self._leaves[node], self._errors[node] = leaves, error
        return Value(node, How.MADE)

    def _folded_or_copied(self, node: fx.Node, why: str) -> Value:
        why_not_folded = self._folding.why_not(node)
        return Value(node, How.FOLDED) if why_not_folded is None else self._copied(node, f"{why}, and {why_not_folded}")

    def _copied(self, node: fx.Node, why: str) -> Value:
        why_not_staged = self._why_not_staged(node)
        if why_not_staged is None:
            return Value(node, How.STAGED, why, when_read(node, waits=self._waits))
        return Value(node, How.COPIED, f"{why}, and {why_not_staged}")

    def _why_not_staged(self, node: fx.Node) -> str | None:
        if not self._stages:
            return "graphs are given no addresses"
        if is_row_of_input(node) and when_read(node, waits=False) is not HostRead.AT_ONCE:
            return "it is a part of an input with gaps"  # otherwise the CPU would copy it at the call
        nbytes = nbytes_of(node)
        if nbytes <= MOST_STAGED_NBYTES or (node in self._folding.constants and _computes_integers(node)):
            return None
        return "its size is not known" if nbytes == math.inf else f"{nbytes} bytes are too many to be staged"


def _shows_constant(node: fx.Node) -> bool:
    """Whether the node is a view of a constant, or its copy, so that one constant serves both."""
    shows = is_view(node) or node.target is aten.lift_fresh_copy.default
    return isinstance(node.target, torch._ops.OpOverload) and shows


def _computes_integers(node: fx.Node) -> bool:
    """Whether a constant depends on integers that are computed.

    Instead of a copy, Inductor computes what reads no input on the GPU, where they may be others.
    """
    todo, seen = [node], {node}
    for current in todo:
        if any(map(is_integral, tensors_of(current))) and not (is_constructor(current) or keeps_memory(current)):
            return True
        todo += [source for source in current.all_input_nodes if source not in seen]
        seen.update(current.all_input_nodes)
    return False
