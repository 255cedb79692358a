"""Decides, for each CPU value that the GPU needs, how the GPU gets it.

:class:`Plan` takes a post-grad graph and has a :class:`Value` for each, with the reason for each copy. A value that
depends on constants alone keeps the CPU's bits; one that depends on inputs may differ in the last place. README.md
gives the order of the choices.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from torch import fx

from pygraph_trees.cuda.host_reads import HostRead
from pygraph_trees.reasons import Reason, Why
from pygraph_trees.report import records
from pygraph_trees.report.naming import source_line

from . import nodes
from .folding import Folding
from .operators import Error, error_of, indices_of, is_elementwise, keeps_memory, looks_up_within, why_not_elsewhere
from .readers import needs, reader_that_jumps, waits_for_stream, when_read

# A larger value is copied outside of the CUDA graph, once to pinned memory and once to the GPU. Upstream copies pinned
# memory only once; at about this size, the additional copy takes as long as splitting the graph (measured: 98 us
# against 80 a call for 4 KiB; the host copies 12 to 16 GB/s).
MOST_STAGED_NBYTES = 320 << 10
# Inputs up to this size are copied in place of a smaller value that depends on them: the transfer takes about as long
# as the shortest one, and copying the value would be a transfer as well.
MOST_NBYTES = 64 << 10
_NARROW = frozenset({torch.int8, torch.uint8, torch.int16, torch.uint16})


class How(Enum):
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
    why: Why | None = None  # why it is copied at each call; None if it is not
    read: HostRead = HostRead.AT_ONCE  # when the program reads a copied value
    leaves: frozenset[fx.Node] = frozenset()  # the copied or kept values that it depends on
    error: Error = Error.NONE  # of a value made on the GPU


@dataclass(slots=True)
class Placed:
    """The result of placement for one graph."""

    moves: list[Value] = field(default_factory=list)  # for which the GPU no longer waits for the CPU
    stays: list[Value] = field(default_factory=list)
    why_not: Why | None = None  # set if the graph was left alone

    def records(self) -> Iterator[records.Placed]:
        for value in (*self.moves, *self.stays):
            source = source_line(value.node.meta.get("stack_trace"))
            yield records.Placed(value.node.name, value.how.value, value.why, source)


class Plan:
    """The decisions for a graph; the arguments are those of :func:`~.moves.place`."""

    def __init__(self, graph: fx.Graph, *, exact: bool, stages: bool, folds: bool) -> None:
        self._exact, self._stages = exact, stages
        self._waits = any(map(waits_for_stream, graph.nodes))
        self._symbols = {symbol for node in graph.nodes if nodes.is_on_gpu(node) for symbol in _symbols_of(node)}
        self.folding = Folding(graph, folds=folds)
        self.reads = {node: sources for node in graph.nodes if (sources := needs(node))}  # by GPU operators
        self._decided: dict[fx.Node, Value] = {}
        needed = [source for sources in self.reads.values() for source in sources]
        for node in sorted(nodes.reached(needed, self._undecided)):
            if node not in self._decided:
                self._decided[node] = self._from_inputs(node)
        # All that must be on the GPU for these reads; what is neither read nor makes another value is left out.
        self.values = {node: self._decided[node] for node in nodes.reached(needed, self.made_from)}

    def made_from(self, node: fx.Node) -> list[fx.Node]:
        return nodes.cpu_inputs(node) if self._decided[node].how is How.MADE else []

    def _undecided(self, node: fx.Node) -> list[fx.Node]:
        """Decides for a node if that needs no decision for its inputs; otherwise returns these."""
        if (value := self._without_inputs(node)) is None:
            return nodes.cpu_inputs(node)
        self._decided[node] = value
        return []

    def _without_inputs(self, node: fx.Node) -> Value | None:
        """The decision for a node if it is the same for all decisions for its inputs."""
        if node.op == "get_attr":
            if not self.folding.loses_bits(node):
                return Value(node, How.CONSTANT)
            return self._folded_or_copied(node, Reason.LITERALS())
        if node.op == "placeholder":
            return self._copied(node, Reason.INPUT())
        if nodes.is_copy_between_devices(node) and nodes.is_on_gpu(node.args[0]):
            if node.args[0].op != "placeholder" and node.meta["val"].dtype in _NARROW:
                return self._copied(node, Reason.NARROW())
            return Value(node, How.KEPT, leaves=frozenset([node]))
        is_constant = node in self.folding.constants
        why = why_not_elsewhere(node, exact=self._exact or is_constant)
        if why is None and not all(map(nodes.is_on_cpu, filter(nodes.tensors_of, node.all_input_nodes))):
            why = Reason.SEVERAL_DEVICES()
        if why is None:
            return None
        return self._folded_or_copied(node, why) if is_constant else self._copied(node, why)

    def _from_inputs(self, node: fx.Node) -> Value:
        sources = [self._decided[source] for source in nodes.cpu_inputs(node)]
        fuses = is_elementwise(node) and all(source.how in (How.MADE, How.CONSTANT) for source in sources)
        folds = node in self.folding.constants and not (fuses or _shows_constant(node))
        if folds and self.folding.why_not(node) is None:
            return Value(node, How.FOLDED)
        leaves = frozenset().union(*(source.leaves for source in sources))
        copied = [leaf for leaf in map(self._decided.__getitem__, leaves) if leaf.how is not How.KEPT]
        stuck = next((leaf for leaf in copied if leaf.node.op != "placeholder"), None)
        nbytes = sum(nodes.nbytes_of(leaf.node) for leaf in copied)
        inexact = max(sources, key=lambda source: source.error, default=Value(node, How.MADE))
        error = error_of(node, inexact.error)
        indices = indices_of(node)
        if stuck is not None:
            return self._copied(node, Reason.COMPUTED_FROM(name=stuck.node.name, why=stuck.why))
        if any(self._decided[index].leaves for _, index in indices):
            return self._copied(node, Reason.INDEX_GIVEN())
        if indices and not looks_up_within(node, self.folding.value):
            return self._copied(node, Reason.INDEX_UNPROVEN())
        if error is None:
            return self._copied(node, Reason.INEXACT(name=inexact.node.name))
        if nbytes > MOST_NBYTES and nbytes > nodes.nbytes_of(node):
            return self._copied(node, Reason.SOURCES_LARGER(nbytes=nbytes))
        if error is not Error.NONE and (reader := reader_that_jumps(node, error)) is not None:
            return self._copied(node, Reason.READ_BY_JUMP(name=reader.name))
        if leaves and not _symbols_of(node) <= self._symbols:  # each of its values would need a recording
            return self._copied(node, Reason.NUMBER_FOR_CPU())
        return Value(node, How.MADE, leaves=leaves, error=error)

    def _folded_or_copied(self, node: fx.Node, why: Why) -> Value:
        also = self.folding.why_not(node)
        return Value(node, How.FOLDED) if also is None else self._copied(node, Reason.BOTH(first=why, second=also))

    def _copied(self, node: fx.Node, why: Why) -> Value:
        """A value that is staged if that is possible, and otherwise copied outside of the graph."""
        read, nbytes = when_read(node), nodes.nbytes_of(node)
        why_not = None
        if not self._stages:
            why_not = Reason.NO_STAGING()
        elif read is not HostRead.AT_ONCE and nodes.is_row_of_input(node):  # otherwise the CPU copies it at the call
            why_not = Reason.GAPS()
        elif nbytes > MOST_STAGED_NBYTES and not (node in self.folding.constants and _computes_integers(node)):
            why_not = Reason.SIZE_UNKNOWN() if nbytes == math.inf else Reason.TOO_LARGE(nbytes=nbytes)
        if why_not is not None:
            return Value(node, How.COPIED, Reason.BOTH(first=why, second=why_not), read, frozenset([node]))
        if self._waits:
            read = HostRead.IN_ORDER  # no copy is later than that wait, and no read is needed before it
        return Value(node, How.STAGED, why, read, frozenset([node]))


def _symbols_of(node: fx.Node) -> set[Any]:
    """The symbols of the numbers that a node is given, and of a GPU value's size."""
    sizes = [size for tensor in nodes.tensors_of(node) for size in tensor.shape] if nodes.is_on_gpu(node) else []
    values = [*(source.meta.get("val") for source in node.all_input_nodes), *sizes]
    return {symbol for n in values if isinstance(n, torch.SymInt) for symbol in n.node.expr.free_symbols}


def _shows_constant(node: fx.Node) -> bool:
    """Whether the node is a view of a constant, or its copy, so that one constant serves both."""
    is_operator = isinstance(node.target, torch._ops.OpOverload)
    return is_operator and (nodes.is_view(node) or node.target is nodes.aten.lift_fresh_copy.default)


def _computes_integers(node: fx.Node) -> bool:
    """Whether a constant depends on integers that are computed.

    Instead of a copy, Inductor computes what reads no input on the GPU, where they may be others.
    """
    return any(
        any(map(nodes.is_integral, nodes.tensors_of(current)))
        and not (nodes.is_constructor(current) or keeps_memory(current))
        for current in nodes.reached([node], lambda current: current.all_input_nodes)
    )
