"""Computes, at compile time, CPU values that depend on constants alone.

:class:`Folding` runs the graph's own operators on real CPU tensors, so a value has eager's bits; none that is random,
mutating or custom, or whose size is not known. If an operator fails, its value stays on the CPU and the reason is kept.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import operator
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from pygraph_trees.reasons import Reason, Why

from . import nodes
from .operators import is_sum_of_another, why_not_the_same_again

if TYPE_CHECKING:
    from torch._subclasses.fake_tensor import FakeTensorMode

# A larger value costs more GPU memory and cache than the kernel that computes it is worth.
MOST_FOLDED_NBYTES = 1 << 20
# The limit for all values of one graph together, intermediate values included.
MOST_EVALUATED_NBYTES = 64 << 20
_MOST_INLINED = 8  # elements; Inductor writes up to this many into a kernel as literals, in one dimension at most
_FOLDED_TYPES = nodes.HALVES | {
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32,
    torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2, torch.float32, torch.float64, torch.complex64,
    torch.complex128,
}  # fmt: skip
_FLOAT8 = frozenset({torch.float8_e4m3fn, torch.float8_e5m2})  # a kernel loads these types as single precision
_LITERALS = nodes.HALVES | {torch.float32, torch.float64, torch.int64, torch.int32, torch.bool}

_log = logging.getLogger("pygraph_trees.placement")


class Folding:
    """The values of a graph that depend on constants alone; ``folds`` is whether it may have new constants."""

    def __init__(self, graph: fx.Graph, *, folds: bool) -> None:
        self._graph, self._folds = graph, folds
        self.constants = _constants_of(graph)
        self.values: dict[fx.Node, Any] = {}  # of all nodes that were evaluated
        self._failed: dict[fx.Node, tuple[fx.Node, Why]] = {}  # nodes without a value; the cause, and why it has none
        self._left = MOST_EVALUATED_NBYTES

    def why_not(self, node: fx.Node) -> Why | None:
        """Says why a value cannot be a constant of the compiled graph; None if it can, and :meth:`held` creates it."""
        if not self._folds:
            return Reason.IN_BRANCH()
        if (why := self._why_stuck(node)) is not None:
            return why
        value = node.meta["val"]
        if self._graph.owning_module is None or not isinstance(value, torch.Tensor):
            return Reason.SEVERAL_VALUES()
        if value.dtype not in _FOLDED_TYPES:
            return Reason.NO_CONSTANT_TYPE()
        if value.is_complex() and not value.is_contiguous():
            return Reason.COMPLEX_ORDER()
        if nodes.nbytes_of(node) > MOST_FOLDED_NBYTES:
            return Reason.LARGE_CONSTANT(nbytes=nodes.nbytes_of(node))
        self._evaluate(node)
        if (why := self._why_stuck(node)) is not None:
            return why
        with _as_eager_runs():
            if value.dtype in _FLOAT8 and not self.values[node].float().isfinite().all():
                return Reason.FLOAT8()
        return None

    def value(self, node: fx.Node) -> torch.Tensor | None:
        """The tensor that a node gives in every call; None if it is unknown."""
        self._evaluate(node)
        value = self.values.get(node)
        return value if isinstance(value, torch.Tensor) else None

    def loses_bits(self, node: fx.Node) -> bool:
        """Whether Inductor would write the value of a constant into a kernel as numbers that lose bits."""
        value = self.value(node)
        return value is not None and _is_written_as_literals(value) and not _literals_keep_bits(value)

    def held(self, node: fx.Node, mode: FakeTensorMode | None) -> fx.Node:
        """Adds a node that names a copy of the value, which becomes a buffer of the graph's module.

        The buffer has two dimensions if Inductor would otherwise write it into a kernel as numbers that lose bits. A
        complex number becomes two real numbers.
        """
        module = self._graph.owning_module
        assert module is not None  # otherwise the value cannot be folded
        value, like = self.values[node], node.meta["val"]
        with _as_eager_runs():
            strides = (like if nodes.is_dense(like) else value.contiguous()).stride()
            constant = torch.empty_strided(value.size(), strides, dtype=value.dtype, device="cpu").copy_(value)
            if constant.is_complex():
                constant = torch.view_as_real(constant)
            if _is_written_as_literals(constant) and not (_literals_keep_bits(constant) and _may_be_counted(constant)):
                constant = constant.view(1, -1)
        name = next(name for n in itertools.count() if not hasattr(module, name := f"_folded_constant{n}"))
        module.register_buffer(name, constant, persistent=False)
        held = self._graph.get_attr(name)
        held.meta["val"] = constant if mode is None else mode.from_tensor(constant, static_shapes=True)
        return held

    def _evaluate(self, node: fx.Node) -> None:
        """Gives a value to a node and all that it depends on, or notes why not, so that no later node looks further."""
        todo = nodes.reached([node], lambda n: () if n in self.values or self._why_stuck(n) else n.all_input_nodes)
        missing = sorted(current for current in todo if current not in self.values)
        if self._failed.keys().isdisjoint(missing):
            nbytes = sum(map(nodes.nbytes_of, missing))
            if nbytes > self._left:  # less is left later
                self._failed[node] = node, Reason.LARGE_EVALUATION(nbytes=nbytes)
            else:
                self._left -= int(nbytes)
                with _as_eager_runs():
                    all(map(self._run, missing))  # up to the first one that fails
        failed = next((self._failed[current] for current in todo if current in self._failed), None)
        if failed is not None:
            self._failed[node] = failed

    def _why_stuck(self, node: fx.Node) -> Why | None:
        """Says why a node has no value, as far as that is known without evaluating it."""
        if node not in self._failed and (why := self._why_not_run(node)) is not None:
            self._failed[node] = node, why
        cause, why = self._failed.get(node, (node, None))
        return why if cause is node else Reason.COMPUTED_FROM(name=cause.name, why=why)

    def _why_not_run(self, node: fx.Node) -> Why | None:
        """Says why a node cannot be evaluated at compile time, whatever its inputs are."""
        if node not in self.constants:
            return Reason.NOT_CONSTANT()
        if not all(isinstance(size, int) for tensor in nodes.tensors_of(node) for size in tensor.shape):
            return Reason.SIZE_AT_CALL()
        if node.op == "get_attr" or node.target is operator.getitem:
            return None
        if any(part in str(node.target) for part in ("empty", "resize", "from_file")):
            return Reason.UNSET()
        if any(not nodes.tensors_of(source) for source in node.all_input_nodes):
            return Reason.NUMBER_AT_CALL()
        return why_not_the_same_again(node) or (Reason.LAST_PLACE() if is_sum_of_another(node) else None)

    def _run(self, node: fx.Node) -> bool:
        """Evaluates a node whose inputs have values; returns False, with the reason noted, if it gets no value."""
        try:
            target: Any = node.target
            args, kwargs = fx.map_arg((node.args, node.kwargs), self.values.__getitem__)
            value: Any = nodes.held_tensor(node) if node.op == "get_attr" else target(*args, **kwargs)
        except Exception as error:  # whatever an operator raises here, eager raises in the call
            _log.debug("%s cannot be computed when the graph is compiled: %s", node, error)
            self._failed[node] = node, Reason.NOT_EVALUATED()
            return False
        traced, found = (
            [(tuple(t.shape), t.dtype, t.device) for t in pytree.tree_leaves(result) if isinstance(t, torch.Tensor)]
            for result in (node.meta["val"], value)
        )
        if traced != found:
            self._failed[node] = node, Reason.OTHER_RESULT()
            return False
        self.values[node] = value
        return True


def _is_written_as_literals(value: torch.Tensor) -> bool:
    """Whether Inductor writes a constant of this shape into kernels as numbers."""
    return value.dim() == 0 or (value.dim() == 1 and value.numel() <= _MOST_INLINED)


def _literals_keep_bits(value: torch.Tensor) -> bool:
    """Whether literals in a kernel's source keep the bits: no negative zero, infinity, NaN or unusual type."""
    return value.dtype in _LITERALS and bool((value.isfinite() & ~((value == 0) & value.signbit())).all())


def _may_be_counted(value: torch.Tensor) -> bool:
    """Whether a number survives if Inductor merges it with what a kernel counts, in 32 bits, unconverted."""
    if value.numel() != 1 or value.dtype == torch.bool:
        return True  # several numbers are no part of an expression
    return value.is_floating_point() and value.item() == value.float().item()


@contextlib.contextmanager
def _as_eager_runs() -> Iterator[None]:
    """Operators run on real tensors, unmodified, and record nothing."""
    with (
        _disable_current_modes(),
        torch._C.DisableTorchFunction(),
        torch._C._DisableAutocast(),
        torch.inference_mode(False),
        torch.no_grad(),
    ):
        yield


def _constants_of(graph: fx.Graph) -> frozenset[fx.Node]:
    """CPU values that depend on constructors and tensors of the graph alone."""
    found: set[fx.Node] = set()
    written = _written(graph)
    for node in filter(nodes.is_on_cpu, graph.nodes):
        if node.op == "get_attr":
            held = nodes.held_tensor(node)
            is_constant = held is not None and held.untyped_storage().data_ptr() not in written
        else:
            sources = [source for source in node.all_input_nodes if nodes.tensors_of(source)]
            is_constant = nodes.is_constructor(node) or (bool(sources) and found.issuperset(sources))
        if is_constant:
            found.add(node)
    return frozenset(found)


def _written(graph: fx.Graph) -> set[int]:
    """Addresses of the graph's tensors that an operator may write to, directly or through views."""
    writers = [node for node in graph.nodes if node.op == "call_function" and nodes.may_write(node)]
    written = nodes.reached(writers, lambda node: filter(nodes.is_view, node.all_input_nodes))
    held = [nodes.held_tensor(source) for node in written for source in node.all_input_nodes]
    return {tensor.untyped_storage().data_ptr() for tensor in held if tensor is not None}
