"""Rewrites a graph so that the GPU waits for the CPU as little as possible.

Other users of a CPU value keep it; a value without users is erased. So a returned value stays on the CPU, and a call
with a side effect happens once, in place. A folded value is a buffer of the graph's module, which Inductor moves to the
GPU at compile time. A graph with no GPU or several is left alone, with the reason.
"""

from __future__ import annotations

import contextlib
import math
from typing import Any

import torch
from torch import fx
from torch._guards import detect_fake_mode
from torch.utils._pytree import tree_map

from pygraph_trees.cuda.host_reads import HostRead

from .arithmetic import (
    computes_in_double,
    factors_of,
    is_conversion,
    is_inverse_root,
    is_negation,
    mixes_with_half,
    rounds_numbers_to,
    terms_of,
)
from .counting import Counting
from .nodes import (
    HALVES,
    aten,
    cpu_inputs,
    is_a_whole,
    is_copy_between_devices,
    is_on_cpu,
    is_on_gpu,
    is_row_of_input,
    is_view,
    nbytes_of,
    prims,
    takes_from_gpu,
    tensors_of,
)
from .operators import may_wait
from .plan import MOST_STAGED_NBYTES, How, Placed, Plan, Value, needs
from .rounding import lower_rounding, rounded_product, rounded_quotient, rounded_to
from .staging import staged

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
    lower_rounding()
    _Rewriting(graph, gpus.pop(), Plan(graph, exact=exact, folds=folds), placed, stages).run()
    return placed


class _Rewriting:
    def __init__(self, graph: fx.Graph, gpu: torch.device, plan: Plan, placed: Placed, stages: bool) -> None:
        self._graph, self._gpu, self._plan, self._placed, self._stages = graph, gpu, plan, placed, stages
        self._mode = detect_fake_mode([tensor for node in graph.nodes for tensor in tensors_of(node)])
        self._anchor: fx.Node | None = None  # a tensor on the GPU, after the inputs
        self._there: dict[fx.Node, fx.Node] = {}  # from a CPU value to the same value on the GPU
        self._counting = Counting()
        self._waits = any(map(_waits_for_stream, graph.nodes))  # in the graph before the rewrite

    def run(self) -> None:
        for node in list(self._graph.nodes):
            if is_copy_between_devices(node) and is_on_gpu(node) and is_on_cpu(node.args[0]):
                self._replace_copy(node)
                continue
            for source in needs(node):
                there = self._on_gpu(source)
                node.replace_input_with(source, there)
        self._erase_unused()
        self._graph.lint()

    def _erase_unused(self) -> None:
        """Erases nodes whose values are now on the GPU, or were folded, if they have no users left."""
        there = {node for node in self._there if self._plan.how(node) is not How.COPIED}
        for node in sorted(there | set(self._plan.folding.evaluated()), reverse=True):
            if not node.users:
                self._graph.erase_node(node)

    def _replace_copy(self, copy: fx.Node) -> None:
        source = copy.args[0]
        assert isinstance(source, fx.Node)
        there = self._on_gpu(source)
        wanted = copy.meta["val"]
        if wanted.stride() != there.meta["val"].stride():
            self._placed.stays.append(Value.of(copy, How.COPIED, "its copy has other strides"))
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
            if current in self._there:
                todo.pop()
                continue
            how = self._plan.how(current)
            missing = [s for s in cpu_inputs(current) if s not in self._there] if how is How.MADE else []
            if missing:
                todo += missing
            else:
                self._there[current] = self._put(current, how)
        return self._there[node]

    def _put(self, node: fx.Node, how: How) -> fx.Node:
        why_not_staged = None if how is not How.COPIED else self._why_not_staged(node)
        if how is How.COPIED:
            why = self._plan.why[node] + (f", and {why_not_staged}" if why_not_staged else "")
            self._placed.stays.append(Value.of(node, How.COPIED if why_not_staged else How.STAGED, why))
        else:
            self._placed.moves.append(Value.of(node, how))
        if how is How.MADE:
            return self._made_there(node)
        if how is How.KEPT:
            source, dtype = node.args[0], node.meta["val"].dtype
            assert isinstance(source, fx.Node)
            with self._graph.inserting_before(node.next):  # keeps the order
                if dtype in HALVES and source.op != "placeholder":  # a copied value is already rounded
                    return self._call(rounded_to, (self._converted(source, torch.float32, node), dtype), node)
                return self._converted(source, dtype, node)
        if how is How.FOLDED:
            return self._folded(node)
        if how is How.CONSTANT and node.op == "get_attr":
            with self._graph.inserting_after(_after_placeholders(node)):
                return self._put_there(node, node)
        if how is How.CONSTANT or why_not_staged:
            with self._graph.inserting_after(_after_placeholders(node)):
                return self._call(prims.device_put.default, (node, self._gpu, _may_be_late(node)), node)
        if self._anchor is None:
            with self._graph.inserting_after(_after_placeholders(next(iter(self._graph.nodes)))):
                self._anchor = self._call(aten.empty.memory_format, ([0],), node, {"device": self._gpu})
        host = node
        if not is_a_whole(node):
            with self._graph.inserting_after(node):
                host = self._call(aten.clone.default, (node,), node)
        with self._graph.inserting_after(max(self._anchor, host)):
            return self._call(staged, (self._anchor, host, int(_when_read(node, waits=self._waits))), node)

    def _folded(self, node: fx.Node) -> fx.Node:
        """Computes the value of a node now and makes it a constant of the graph."""
        with self._graph.inserting_after(_after_placeholders(node)):
            held = self._plan.folding.held(node, self._mode)
        with self._graph.inserting_after(held):
            there = self._put_there(held, node)
        value = node.meta["val"]
        if value.is_complex():
            with self._graph.inserting_after(there):
                there = self._call(aten.view_as_complex.default, (there,), node)
        if there.meta["val"].shape == value.shape:
            return there
        with self._graph.inserting_after(there):
            return self._call(aten.view.default, (there, list(value.shape)), node)

    def _put_there(self, held: fx.Node, like: fx.Node) -> fx.Node:
        """Puts a constant on the GPU after the point of insertion, as a copy, because the program may write to it."""
        copy = self._call(aten.clone.default, (held,), like)
        with self._graph.inserting_after(copy):
            return self._call(prims.device_put.default, (copy, self._gpu), like)

    def _why_not_staged(self, node: fx.Node) -> str | None:
        if not self._stages:
            return "graphs are given no addresses"
        if is_row_of_input(node) and _when_read(node, waits=False) is not HostRead.AT_ONCE:
            return "it is a part of an input with gaps"  # otherwise the CPU would copy it at the call
        nbytes = nbytes_of(node)
        if nbytes <= MOST_STAGED_NBYTES or self._would_differ(node):
            return None
        return "its size is not known" if nbytes == math.inf else f"{nbytes} bytes are too many to be staged"

    def _would_differ(self, node: fx.Node) -> bool:
        """Whether the GPU would count other numbers: instead of a copy, Inductor computes what reads no input there."""
        todo, seen, differs = [node], {node}, False
        while todo:
            current = todo.pop()
            if current.op == "placeholder" and tensors_of(current):
                return False
            differs = differs or self._counting.why_not_counted(current) is not None
            todo += [source for source in current.all_input_nodes if source not in seen]
            seen.update(current.all_input_nodes)
        return differs

    def _made_there(self, node: fx.Node) -> fx.Node:
        args, given = fx.map_arg((node.args, node.kwargs), lambda n: self._there.get(n, n))
        kwargs = dict(given)
        if "device" in kwargs:
            kwargs |= {"device": self._gpu}
        if kwargs.get("pin_memory"):
            kwargs |= {"pin_memory": False}
        value = node.meta["val"]
        latest = max([node, *(self._there[source] for source in cpu_inputs(node))])
        with self._graph.inserting_before(latest.next):
            if is_conversion(node) and value.dtype in HALVES:
                return self._converted(args[0], value.dtype, node)
            if is_negation(node):
                return self._call(aten.mul.Tensor, (args[0], -1.0), node)
            if not computes_in_double(node):
                dtype = rounds_numbers_to(node)
                if dtype is not None:
                    args, kwargs = tree_map(lambda arg: _rounded(arg, dtype), (args, kwargs))
                result = self._call(node.target, args, node, kwargs)
                if not mixes_with_half(node):
                    return result
                return self._call(rounded_to, (self._converted(result, torch.float32, node), value.dtype), node)
            args, kwargs = tree_map(lambda value: self._in_double(value, node), (args, kwargs))
            factors, terms = factors_of(node, args), terms_of(node, args)
            if is_inverse_root(node):
                result = self._call(aten.rsqrt.default, args[:1], node)
            elif factors is not None:
                result = self._call(rounded_product, tuple(self._tensor(factor, node) for factor in factors), node)
            elif terms is not None:
                result = self._call(rounded_quotient, tuple(self._tensor(term, node) for term in terms), node)
            else:
                result = self._call(node.target, args, node, kwargs)
            return self._in_single(result, node)

    def _tensor(self, value: Any, like: fx.Node) -> fx.Node:
        if isinstance(value, fx.Node) and isinstance(value.meta["val"], torch.Tensor):
            return value
        return self._call(aten.full.default, ([], value), like, {"dtype": torch.float64, "device": self._gpu})

    def _in_double(self, value: Any, like: fx.Node) -> Any:
        """An argument in double precision, with the value that the CPU computes with."""
        if isinstance(value, float):
            return _rounded(value, torch.float32)
        if not isinstance(value, fx.Node) or not isinstance(value.meta["val"], torch.Tensor):
            return value
        return self._converted(self._in_single(value, like), torch.float64, like)

    def _in_single(self, value: fx.Node, like: fx.Node) -> fx.Node:
        """A value in single precision, rounded even if Inductor would drop the conversion."""
        single = self._converted(value, torch.float32, like)
        if not self._counting.loses_rounding(value, torch.float32):
            return single
        one = self._call(aten.full.default, ([], 1.0), like, {"dtype": torch.float32, "device": self._gpu})
        return self._call(rounded_product, (single, one), like)

    def _converted(self, node: fx.Node, dtype: torch.dtype, like: fx.Node) -> fx.Node:
        given = node.meta["val"].dtype
        if given == dtype:
            return node
        if dtype in HALVES:  # a CPU converts everything through single precision
            return self._call(rounded_to, (self._converted(node, torch.float32, like), dtype), like)
        return self._call(prims.convert_element_type.default, (node, dtype), like)

    def _call(self, target: Any, args: Any, like: fx.Node, kwargs: Any = None) -> fx.Node:
        node = self._graph.call_function(target, args, kwargs or {})
        node.meta |= {name: like.meta[name] for name in _ORIGIN if name in like.meta}
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
        with contextlib.nullcontext() if self._mode is None else self._mode:
            node.meta["val"] = target(*args, **kwargs)
        return node


def _rounded(value: Any, dtype: torch.dtype) -> Any:
    """An argument as a tensor of this type would hold it."""
    return torch.tensor(value, dtype=dtype).item() if isinstance(value, float) else value


def _may_be_late(node: fx.Node) -> bool:
    """Whether the program asks for non-blocking copies of the node only."""
    return all(is_copy_between_devices(user) and _is_non_blocking(user) for user in node.users)


def _when_read(node: fx.Node, *, waits: bool) -> HostRead:
    """When the program reads a staged value, directly or through views.

    If the program ``waits`` for its stream anywhere, no copy is later than that wait, and no read is needed before it.
    """
    reads = [
        (value, user)
        for value in _itself_and_views(node)
        for user in value.users
        if not is_view(user) or _mutates(user)
    ]
    if reads and all(is_copy_between_devices(user) and _is_non_blocking(user) for _, user in reads):
        return HostRead.IN_ORDER if waits else HostRead.LATER
    at_once = not waits and all(_is_read_at_once(value, user) for value, user in reads)
    return HostRead.AT_ONCE if at_once else HostRead.IN_ORDER


def _itself_and_views(node: fx.Node) -> list[fx.Node]:
    """A value, its views and their views: on the CPU or, if they were moved, on the GPU."""
    found = [node]
    for value in found:
        found += [user for user in value.users if is_view(user) and user not in found]
    return found


def _is_read_at_once(value: fx.Node, user: fx.Node) -> bool:
    """Whether an operator reads a CPU value when it is called: a CPU operator, or one that takes the value as a number.

    Other GPU operators copy the value in stream order.
    """
    if is_on_cpu(user):
        return True
    tags = user.target.tags if isinstance(user.target, torch._ops.OpOverload) else ()
    is_number = value.meta["val"].dim() == 0 and torch.Tag.pointwise in tags
    return is_number and user.target is not aten.where.self  # `where` copies the number


def _waits_for_stream(node: fx.Node) -> bool:
    """Whether an operator copies between devices and waits for the copy, and so for all earlier ones."""
    if is_copy_between_devices(node):
        return not _is_non_blocking(node)
    if takes_from_gpu(node):
        return not (node.target is aten.copy.default and _is_non_blocking(node))
    return may_wait(node) or any(not _is_read_at_once(source, node) for source in needs(node))


def _is_non_blocking(copy: fx.Node) -> bool:
    third = copy.target in (prims.device_put.default, aten.copy.default) and len(copy.args) > 2
    given = copy.args[2] if third else None
    return bool(copy.kwargs.get("non_blocking", given))


def _is_written_to_or_returned(node: fx.Node) -> bool:
    """Whether an output or an operator that writes may hold the node's memory, directly or through views.

    A tensor that is written to may be the source of its own values.
    """
    todo, seen = [node], {node}
    while todo:
        for user in todo.pop().users:
            if user.op == "output" or _writes(user):
                return True
            if user not in seen and is_view(user):
                seen.add(user)
                todo.append(user)
    return False


def _writes(node: fx.Node) -> bool:
    return not isinstance(node.target, torch._ops.OpOverload) or _mutates(node)


def _mutates(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def _after_placeholders(node: fx.Node) -> fx.Node:
    """The place right after a node, or after all inputs of the graph if the node is one of them."""
    while node.op == "placeholder" and node.next.op == "placeholder":
        node = node.next
    return node
