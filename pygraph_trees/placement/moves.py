"""Rewrites a graph so that the GPU waits for the CPU as little as possible, as ``plan.py`` decides.

Other users of a CPU value keep it; a value without users is erased. So a returned value stays on the CPU, and a call
with a side effect happens once, in place. A folded value is a buffer of the graph's module, which Inductor moves to the
GPU at compile time. A graph with no GPU or several is left alone, with the reason.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import fx
from torch._guards import detect_fake_mode
from torch.utils._pytree import tree_map

from .folding import Folding
from .nodes import (
    HALVES,
    aten,
    cpu_inputs,
    is_a_whole,
    is_constructor,
    is_integral,
    is_view,
    prims,
    tensors_given,
    tensors_of,
)
from .operators import is_conversion, is_negation, keeps_memory
from .plan import How, Placed, Value, planned
from .readers import copies_to_gpu, may_be_late, mutates, needs
from .staging import staged
from .stored import lower_stored, stored

# The metadata on a node's origin. Inductor names kernels by it, and keeps what it tunes under a hash with the name.
_ORIGIN = ("stack_trace", "original_aten", "from_node")


def place(
    graph: fx.Graph, *, exact: bool = False, stages: bool = True, folds: bool = True, placed: Placed | None = None
) -> Placed:
    """Rewrites a functional graph whose nodes have their values under "val"; returns the moved and remaining values.

    Args:
        exact: leave floating-point computations, whose results may differ in the last place, to the CPU.
        stages: whether the CUDA graph itself may make the copies of each call.
        folds: whether the graph may have new constants; Inductor loses those of branches and loops.
        placed: the record to fill, which also has the changes made before an error.
    """
    placed = Placed() if placed is None else placed
    devices = {tensor.device for node in graph.nodes for tensor in tensors_of(node)}
    gpus = {device for device in devices if device.type == "cuda"}
    if len(gpus) != 1:
        placed.why_not = "it has several GPUs" if gpus else "it has no GPU"
        return placed
    if torch.device("cpu") not in devices:
        return placed
    lower_stored()
    folding = Folding(graph, folds=folds)
    _Rewriting(graph, gpus.pop(), folding, planned(graph, folding, exact=exact, stages=stages), placed).run()
    return placed


class _Rewriting:
    def __init__(
        self, graph: fx.Graph, gpu: torch.device, folding: Folding, plan: dict[fx.Node, Value], placed: Placed
    ) -> None:
        self._graph, self._gpu, self._folding, self._plan, self._placed = graph, gpu, folding, plan, placed
        self._mode = detect_fake_mode([tensor for node in graph.nodes for tensor in tensors_of(node)])
        self._anchor: fx.Node | None = None  # a tensor on the GPU, after the inputs
        self._there: dict[fx.Node, fx.Node] = {}  # from a CPU value to the same value on the GPU

    def run(self) -> None:
        for node in list(self._graph.nodes):
            for source in needs(node):
                there = self._on_gpu(source)
                if copies_to_gpu(node):
                    self._replace_copy(node, there)
                else:
                    node.replace_input_with(source, there)
        self._erase_unused()
        self._graph.lint()

    def _erase_unused(self) -> None:
        """Erases nodes whose values are now on the GPU, or were folded, if they have no users left."""
        there = {node for node in self._there if self._plan[node].how not in (How.COPIED, How.STAGED)}
        for node in sorted(there | set(self._folding.evaluated()), reverse=True):
            if not node.users:
                self._graph.erase_node(node)

    def _replace_copy(self, copy: fx.Node, there: fx.Node) -> None:
        wanted = copy.meta["val"]
        if wanted.stride() != there.meta["val"].stride():
            with self._graph.inserting_before(copy):  # a pass may have put one row in place of equal ones
                there = self._call(aten.clone.default, (there,), copy, {"memory_format": torch.contiguous_format})
            if wanted.stride() != there.meta["val"].stride():
                self._graph.erase_node(there)
                self._placed.stays.append(Value(copy, How.COPIED, "its copy has other strides"))
                return
        with self._graph.inserting_before(copy):
            if wanted.dtype != there.meta["val"].dtype:
                there = self._converted(there, wanted.dtype, copy)
            elif _is_written_to_or_returned(copy):
                there = self._call(aten.clone.default, (there,), copy)  # a copy shares its memory with nothing
        copy.replace_all_uses_with(there)
        self._graph.erase_node(copy)

    def _on_gpu(self, node: fx.Node) -> fx.Node:
        """The GPU's node for a node's value."""
        todo = [node]
        while todo:
            current = todo[-1]
            value = self._plan[current]
            sources = cpu_inputs(current) if value.how is How.MADE else ()
            missing = [source for source in sources if source not in self._there]
            todo += missing
            if missing:
                continue
            todo.pop()
            if current not in self._there:
                self._there[current] = self._put(value)
                (self._placed.moves if value.why is None else self._placed.stays).append(value)
        return self._there[node]

    def _put(self, value: Value) -> fx.Node:
        node = value.node
        match value.how:
            case How.MADE:
                return self._made(node)
            case How.KEPT:
                return self._kept(node)
            case How.FOLDED:
                return self._folded(node)
            case How.STAGED:
                return self._staged(value)
        with self._graph.inserting_after(_after_placeholders(node)):
            if value.how is How.CONSTANT:
                return self._constant(node, node)
            return self._call(prims.device_put.default, (node, self._gpu, may_be_late(node)), node)

    def _made(self, node: fx.Node) -> fx.Node:
        value = node.meta["val"]
        latest = max([node, *(self._there[source] for source in cpu_inputs(node))])
        with self._graph.inserting_before(latest.next):
            if is_conversion(node):
                return self._converted(self._there[next(cpu_inputs(node))], value.dtype, node)
            if is_negation(node):
                return self._call(aten.mul.Tensor, (self._there[next(cpu_inputs(node))], -1.0), node)
            computes = not (is_constructor(node) or keeps_memory(node))
            args, kwargs = tree_map(
                lambda arg: self._argument(arg, node, computes=computes), (node.args, dict(node.kwargs))
            )
            if "device" in kwargs:
                kwargs["device"] = self._gpu
            if kwargs.get("pin_memory"):
                kwargs["pin_memory"] = False
            result = self._call(node.target, args, node, kwargs)
            is_half = isinstance(value, torch.Tensor) and value.dtype in HALVES
            return self._stored(result, node) if is_half and computes else result

    def _argument(self, arg: Any, node: fx.Node, *, computes: bool) -> Any:
        """An argument as the GPU's call of a node takes it; a number beside half precision is rounded to that."""
        if isinstance(arg, float):
            halves = {tensor.dtype for tensor in [*tensors_given(node), *tensors_of(node)]} & HALVES
            return torch.tensor(arg, dtype=halves.pop()).item() if len(halves) == 1 else arg
        if not isinstance(arg, fx.Node) or arg not in self._there:
            return arg
        there = self._there[arg]
        counts = any(is_integral(tensor) and tensor.dtype != torch.bool for tensor in tensors_of(there))
        return self._stored(there, node) if counts and computes else there

    def _kept(self, node: fx.Node) -> fx.Node:
        source, dtype = node.args[0], node.meta["val"].dtype
        assert isinstance(source, fx.Node)
        with self._graph.inserting_before(node.next):  # keeps the order
            there = source if source.op == "placeholder" else self._stored(source, node)
            return self._converted(there, dtype, node)

    def _folded(self, node: fx.Node) -> fx.Node:
        """Computes the value of a node now and makes it a constant of the graph."""
        with self._graph.inserting_after(_after_placeholders(node)):
            held = self._folding.held(node, self._mode)
        with self._graph.inserting_after(held):
            there = self._constant(held, node)
        value = node.meta["val"]
        if value.is_complex():
            with self._graph.inserting_after(there):
                there = self._call(aten.view_as_complex.default, (there,), node)
        if there.meta["val"].shape == value.shape:
            return there
        with self._graph.inserting_after(there):
            return self._call(aten.view.default, (there, list(value.shape)), node)

    def _constant(self, held: fx.Node, like: fx.Node) -> fx.Node:
        """Puts a constant on the GPU after the point of insertion, as a copy, because the program may write to it."""
        copy = self._call(aten.clone.default, (held,), like)
        with self._graph.inserting_after(copy):
            return self._call(prims.device_put.default, (copy, self._gpu), like)

    def _staged(self, value: Value) -> fx.Node:
        node = host = value.node
        if self._anchor is None:
            with self._graph.inserting_after(_after_placeholders(next(iter(self._graph.nodes)))):
                self._anchor = self._call(aten.empty.memory_format, ([0],), node, {"device": self._gpu})
        if not is_a_whole(node):
            with self._graph.inserting_after(node):
                host = self._call(aten.clone.default, (node,), node)
        assert value.read is not None
        with self._graph.inserting_after(max(self._anchor, host)):
            return self._call(staged, (self._anchor, host, int(value.read)), node)

    def _converted(self, node: fx.Node, dtype: torch.dtype, like: fx.Node) -> fx.Node:
        if node.meta["val"].dtype == dtype:
            return node
        if dtype in HALVES:  # a CPU converts everything through single precision
            node = self._converted(node, torch.float32, like)
        result = self._call(prims.convert_element_type.default, (self._stored(node, like), dtype), like)
        return self._stored(result, like) if dtype in HALVES else result

    def _stored(self, node: fx.Node, like: fx.Node) -> fx.Node:
        """The value as a kernel would load it from memory; kernels compute no complex numbers."""
        is_loaded = node.target in (staged, stored) or node.meta["val"].is_complex()
        return node if is_loaded else self._call(stored, (node,), like)

    def _call(self, target: Any, args: Any, like: fx.Node, kwargs: Any = None) -> fx.Node:
        node = self._graph.call_function(target, args, kwargs or {})
        node.meta |= {name: like.meta[name] for name in _ORIGIN if name in like.meta}
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
        with contextlib.nullcontext() if self._mode is None else self._mode:
            node.meta["val"] = target(*args, **kwargs)
        return node


def _is_written_to_or_returned(node: fx.Node) -> bool:
    """Whether an output or an operator that writes may hold the node's memory, directly or through views.

    A tensor that is written to may be the source of its own values.
    """
    todo, seen = [node], {node}
    while todo:
        for user in todo.pop().users:
            if user.op == "output" or not isinstance(user.target, torch._ops.OpOverload) or mutates(user):
                return True
            if user not in seen and is_view(user):
                seen.add(user)
                todo.append(user)
    return False


def _after_placeholders(node: fx.Node) -> fx.Node:
    """The place right after a node, or after all inputs of the graph if the node is one of them."""
    while node.op == "placeholder" and node.next.op == "placeholder":
        node = node.next
    return node
