"""Look-ups in a table of the CPU by one of its numbers, ``table[t]``, as an operator that does not ask for the number.

Where a program is traced the number is not there, so torch breaks the graph at such a line, and nothing behind it is
graphed. ``aten.index`` gives the same values, or the same error for an index that is out of bounds; but it gives a
copy, where ``table[t]`` is a view of the table. So a graph is left alone in which anything is written to, as is what
may be returned. The graph is Dynamo's own, before anything was made of it, whose nodes have fake values; an index that
is computed, or of another type than int64, is asked for by Dynamo itself, which breaks the graph there.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx


def as_operators(graph: fx.Graph) -> int:
    """Rewrites such look-ups; says how many."""
    found = [node for node in graph.find_nodes(op="call_function", target=operator.getitem) if _is_by_number(node)]
    if not found or any(map(_may_write, graph.nodes)):
        return 0
    found = [node for node in found if not _may_be_returned(node)]
    for node in found:
        table, index = node.args
        with graph.inserting_before(node):
            made = graph.call_function(torch.ops.aten.index.Tensor, (table, [index]))
        made.meta = node.meta.copy()
        node.replace_all_uses_with(made)
        graph.erase_node(node)
    return len(found)


def _value(node: Any) -> Any:
    return node.meta.get("example_value") if isinstance(node, fx.Node) else None


def _is_by_number(node: fx.Node) -> bool:
    table, index = map(_value, node.args)
    return (
        isinstance(table, torch.Tensor)
        and isinstance(index, torch.Tensor)
        and table.device.type == index.device.type == "cpu"
        and type(table) is type(index)  # no subclass, which may look things up in its own way
        and table.dim() > 0
        and index.dim() == 0
        and index.dtype == torch.int64
    )


def _may_write(node: fx.Node) -> bool:
    """Whether a call may write to a tensor: by its name, as torch has them."""
    if node.op == "call_module" or "out" in node.kwargs or node.kwargs.get("inplace"):
        return True
    if node.op == "call_method":
        return str(node.target).endswith("_")  # __setitem__ too
    if node.op != "call_function":
        return False
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return target._schema.is_mutable
    if isinstance(target, torch._ops.OpOverloadPacket):
        return any(getattr(target, name)._schema.is_mutable for name in target.overloads())
    if isinstance(target, torch._ops.HigherOrderOperator):
        return True
    module, name = getattr(target, "__module__", None), getattr(target, "__name__", "_")
    if module in ("_operator", "builtins"):
        return name not in _ONLY_READ
    if module == "torch.nn.functional" and any(argument is True for argument in node.args):  # inplace
        return True
    return name.endswith("_") or not (module is None or module.startswith("torch"))  # torch.sin has none


def _may_be_returned(node: fx.Node) -> bool:
    """Whether it, or what may be a view of it, is returned: whatever a call gives that is not of another device, of
    another type, or computed by an operator."""
    todo, seen = [node], {node}
    while todo:
        for user in todo.pop().users:
            if user.op == "output":
                return True
            if user not in seen and not _is_new(user):
                seen.add(user)
                todo.append(user)
    return False


_ONLY_READ = frozenset(
    [
        "getitem",
        "getattr",
        "add",
        "sub",
        "mul",
        "truediv",
        "floordiv",
        "mod",
        "pow",
        "matmul",
        "neg",
        "pos",
        "abs",
        "invert",
        "and_",
        "or_",
        "xor",
        "lshift",
        "rshift",
        "eq",
        "ne",
        "lt",
        "le",
        "gt",
        "ge",
        "not_",
        "truth",
        "is_",
        "is_not",
        "index",
        "contains",
        "min",
        "max",
        "int",
        "float",
        "bool",
        "len",
        "round",
    ]
)
_NEW = frozenset(
    [
        "sqrt",
        "rsqrt",
        "exp",
        "exp2",
        "log",
        "log2",
        "sin",
        "cos",
        "tanh",
        "sigmoid",
        "relu",
        "softmax",
        "neg",
        "abs",
        "pow",
        "add",
        "sub",
        "rsub",
        "mul",
        "div",
        "truediv",
        "reciprocal",
        "square",
        "clamp",
        "maximum",
        "minimum",
        "sum",
        "mean",
        "max",
        "min",
        "where",
        "clone",
        "lerp",
        "eq",
        "ne",
        "lt",
        "le",
        "gt",
        "ge",
    ]
)


def _is_new(node: fx.Node) -> bool:
    """Whether what a call gives is certainly new memory."""
    value = _value(node)
    if isinstance(value, torch.Tensor) and value.device.type != "cpu":
        return True
    name = node.target if node.op == "call_method" else getattr(node.target, "__name__", "")
    return str(name).removeprefix("__").removesuffix("__") in _NEW
