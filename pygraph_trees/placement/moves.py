"""Rewrites a graph so that the GPU waits for the CPU as little as possible, as ``plan.py`` decides.

Other users of a CPU value keep it; a value without users is erased. So a returned value stays on the CPU, and a side
effect happens once, in place. A graph with no GPU or several is left alone, with the reason.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from typing import Any

import torch
from torch import fx
from torch._guards import detect_fake_mode
from torch._inductor import config as inductor_config
from torch.utils._pytree import tree_map

from pygraph_trees.cuda.host_reads import HostRead
from pygraph_trees.reasons import Reason

from . import nodes
from .nodes import HALVES, aten, prims
from .operators import COMPARES, is_conversion, keeps_memory
from .plan import How, Placed, Plan, Value
from .readers import copies_to_gpu, itself_and_views
from .staging import staged
from .stored import lower_stored, stored

# The metadata on a node's origin. Inductor names kernels by it, and keeps what it tunes under a hash with the name.
_ORIGIN = ("stack_trace", "original_aten", "from_node")
# Of constants that ATen makes at each call, in 5 µs each (measured on a CPU).
_MOST_MADE, _SMALL_NBYTES = 4, 64


def place(
    graph: fx.Graph, *, exact: bool = False, stages: bool = True, folds: bool = True, placed: Placed | None = None
) -> Placed:
    """Rewrites a functional graph with its values under "val"; fills and returns ``placed``, also up to an error.

    ``exact``: computations that round stay on the CPU. ``stages``: the CUDA graph itself may copy at each call.
    ``folds``: the graph may have new constants, which Inductor loses in branches and loops.
    """
    placed = Placed() if placed is None else placed
    devices = {tensor.device for node in graph.nodes for tensor in nodes.tensors_of(node)}
    gpus = {device for device in devices if device.type == "cuda"}
    if len(gpus) != 1:
        placed.why_not = Reason.SEVERAL_GPUS() if gpus else Reason.NO_GPU()
    elif torch.device("cpu") in devices:
        lower_stored()
        _Rewriting(graph, gpus.pop(), Plan(graph, exact=exact, stages=stages, folds=folds), placed).run()
    return placed


class _Rewriting:
    def __init__(self, graph: fx.Graph, gpu: torch.device, plan: Plan, placed: Placed) -> None:
        self._graph, self._gpu, self._plan, self._placed = graph, gpu, plan, placed
        self._mode = detect_fake_mode([tensor for node in graph.nodes for tensor in nodes.tensors_of(node)])
        self._there: dict[fx.Node, fx.Node] = {}  # from a CPU value to the same value on the GPU

    def run(self) -> None:
        before = list(self._graph.nodes)
        if are_staged := [node for node, value in self._plan.values.items() if value.how is How.STAGED]:
            with self._graph.inserting_after(_after_placeholders(before[0])):  # tells staged values their GPU
                self._anchor = self._call(aten.empty.memory_format, ([0],), min(are_staged), {"device": self._gpu})
        for node in before:
            if (value := self._plan.values.get(node)) is not None:
                self._there[node] = self._put(value)
                (self._placed.moves if value.why is None else self._placed.stays).append(value)
            for source in self._plan.reads.get(node, ()):
                if copies_to_gpu(node):
                    self._replace_copy(node, self._there[source])
                else:
                    node.replace_input_with(source, self._there[source])
        self._erase_unused()
        self._leave_constants_to_aten()
        self._graph.lint()

    def _erase_unused(self) -> None:
        """Erases nodes whose values are now on the GPU, or were folded, if they have no users left."""
        there = {value.node for value in self._plan.values.values() if value.how not in (How.COPIED, How.STAGED)}
        for node in sorted(there | self._plan.folding.values.keys(), reverse=True):
            if not node.users:
                self._graph.erase_node(node)

    def _leave_constants_to_aten(self) -> None:
        """Has ATen make the small constants that are returned on the CPU, if the CPU computes nothing else.

        A process that compiles its first kernel in C++ builds and loads test libraries for it: 56 s on an H200's host.
        Inductor writes a constant that only GPU operators read into their kernels, unless ATen makes it.
        """
        on_cpu = [n for n in self._graph.nodes if n.op == "call_function" and nodes.is_on_cpu(n) and n.users]
        returned = [n for n in on_cpu if self._graph.output_node() in n.users]
        are_plain = all(n.target is aten.full.default and not n.all_input_nodes for n in on_cpu)
        are_small = all(nodes.nbytes_of(n) <= _SMALL_NBYTES and len(n.users) == 1 for n in returned)
        if are_plain and are_small and len(returned) <= _MOST_MADE and not inductor_config.cpp_wrapper:
            for node in returned:
                node.meta["should_fallback"] = True  # read by Inductor's GraphLowering

    def _replace_copy(self, copy: fx.Node, there: fx.Node) -> None:
        wanted = copy.meta["val"]
        users = [user for value in itself_and_views(copy) for user in value.users]
        with self._graph.inserting_before(copy):
            if wanted.stride() != there.meta["val"].stride():  # a pass may have put one row in place of equal ones
                there = self._call(aten.clone.default, (there,), copy, {"memory_format": torch.contiguous_format})
                if wanted.stride() != there.meta["val"].stride():
                    self._graph.erase_node(there)
                    self._placed.stays.append(Value(copy, How.COPIED, Reason.OTHER_STRIDES()))
                    return
            if wanted.dtype != there.meta["val"].dtype:
                there = self._converted(there, wanted.dtype, copy)
            elif any(user.op == "output" or nodes.may_write(user) for user in users):
                # A copy shares its memory with nothing, and a tensor may be the source of values written to it.
                there = self._call(aten.clone.default, (there,), copy)
        copy.replace_all_uses_with(there)
        self._graph.erase_node(copy)

    def _put(self, value: Value) -> fx.Node:
        """Makes the GPU's node for a value, after all that it needs."""
        node = value.node
        sources = [self._there[source] for source in self._plan.made_from(node)]
        needed = [*sources, self._anchor] if value.how is How.STAGED else sources
        with self._graph.inserting_before(max([_after_placeholders(node), *needed]).next):
            match value.how:
                case How.MADE:
                    return self._made(node, sources)
                case How.KEPT:
                    source: Any = node.args[0]
                    there = source if source.op == "placeholder" else self._stored(source, node)
                    return self._converted(there, node.meta["val"].dtype, node)
                case How.FOLDED:
                    return self._folded(node, self._gpu)
                case How.CONSTANT:
                    return self._constant(node, node, self._gpu)
                case How.STAGED:
                    self._fold_parts(node)
                    host = node if nodes.is_a_whole(node) else self._call(aten.clone.default, (node,), node)
                    return self._call(staged, (self._anchor, host, int(value.read)), node)
                case How.COPIED:
                    # Of a view, torch may copy elements that the CPU gathers during the call.
                    is_late = value.read is HostRead.LATER and not any(map(nodes.is_view, node.users))
                    return self._call(prims.device_put.default, (node, self._gpu, is_late), node)

    def _made(self, node: fx.Node, sources: list[fx.Node]) -> fx.Node:
        value = node.meta["val"]
        if is_conversion(node):
            return self._converted(sources[0], value.dtype, node)
        if node.target is aten.neg.default and value.is_floating_point():
            # A GPU's compiler makes a negation ``0 - x``, which loses -0.0.
            return self._call(aten.mul.Tensor, (sources[0], -1.0), node)
        computes = not (nodes.is_constructor(node) or keeps_memory(node))
        argument = functools.partial(self._argument, node=node, computes=computes)
        args, kwargs = tree_map(argument, (node.args, dict(node.kwargs)))
        if "device" in kwargs:
            kwargs["device"] = self._gpu
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        result = self._call(node.target, args, node, kwargs)
        is_half = isinstance(value, torch.Tensor) and value.dtype in HALVES
        is_rounded = computes or node.all_input_nodes  # the latter are numbers made of sizes
        return self._stored(result, node) if is_half and is_rounded else result

    def _argument(self, arg: Any, node: fx.Node, *, computes: bool) -> Any:
        """An argument as the GPU's call of a node takes it; a number beside half precision is rounded to that."""
        if isinstance(arg, float) or (type(arg) is int and nodes.packet_of(node) in COMPARES):
            halves = {tensor.dtype for tensor in [*nodes.tensors_given(node), *nodes.tensors_of(node)]} & HALVES
            return torch.tensor(arg, dtype=halves.pop()).item() if len(halves) == 1 else arg
        if not isinstance(arg, fx.Node) or arg not in self._there:
            return arg
        there = self._there[arg]
        counts = any(nodes.is_integral(tensor) and tensor.dtype != torch.bool for tensor in nodes.tensors_of(there))
        return self._stored(there, node) if counts and computes else there

    def _fold_parts(self, node: fx.Node) -> None:
        """Folds the values that a constant depends on. In Inductor's C++, integers of 8 and 16 bits may not wrap."""
        folding = self._plan.folding
        computed = lambda n: [s for s in n.all_input_nodes if s in folding.constants and s.op == "call_function"]  # noqa: E731
        for part in nodes.reached({node} & folding.constants, lambda n: filter(folding.why_not, computed(n))):
            with self._graph.inserting_before(part):
                for source in itertools.filterfalse(folding.why_not, computed(part)):
                    part.replace_input_with(source, self._folded(source, torch.device("cpu")))

    def _folded(self, node: fx.Node, device: torch.device) -> fx.Node:
        value = node.meta["val"]
        there = self._constant(self._plan.folding.held(node, self._mode), node, device)
        if value.is_complex():
            there = self._call(aten.view_as_complex.default, (there,), node)
        is_same = there.meta["val"].shape == value.shape
        return there if is_same else self._call(aten.view.default, (there, list(value.shape)), node)

    def _constant(self, held: fx.Node, like: fx.Node, device: torch.device) -> fx.Node:
        """Puts a constant on a device, as a copy, because the program may write to it."""
        copy = self._call(aten.clone.default, (held,), like)
        return copy if device.type == "cpu" else self._call(prims.device_put.default, (copy, device), like)

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


def _after_placeholders(node: fx.Node) -> fx.Node:
    """The place right after a node, or after all inputs of the graph if the node is one of them."""
    while node.op == "placeholder" and node.next.op == "placeholder":
        node = node.next
    return node
