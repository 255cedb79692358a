"""The kernels that generated code launches, each with the module and the line of the model that it comes from.

:func:`calls_of` reads them from the comments in generated code and the ``meta`` of the nodes named there. A call that
is written in another way is not found, and a fact that is not known is None.
"""

from __future__ import annotations

import re
import sys
from typing import Any, NamedTuple

import torch

from .naming import source_line

_FUNCTION = re.compile(r"\s*def (\w+)\(")
_NODES = re.compile(r"\s*# .*Source Nodes: \[(.*?)\], Original ATen: ")
_DEFINED = re.compile(r"^(\w+) = async_compile\.triton\('(\w+)'", re.MULTILINE)
_LAUNCH = re.compile(r"\s*(\w+)\.run\(")
_OPERATOR = re.compile(
    r"\s*(?:\w+ = )?(?:(?:extern_kernels|torch\.ops|aten|inductor_ops|_?quantized)\.([\w.]+)|\w+\.(copy_))\("
)
_ROOT = re.compile(r"[LG]\['[^']+'\]\.?")  # the variable that holds the outermost module


class Call(NamedTuple):
    kernel: str | None  # the name of a Triton kernel; None if an operator launches the kernels of its library
    operator: str | None
    module: str | None  # "layers.0.attention"; the class of the outermost module
    line: str | None  # "model.py:31 in forward: return self.fc(x)"


def calls_of(source: str, gm: torch.fx.GraphModule) -> tuple[tuple[Call, ...], ...]:
    """The calls of each partition that may be graphed, or of the one function of code without partitions."""
    kernels, known = dict(_DEFINED.findall(source)), dict[str, dict[str, Any]]()
    for node in gm.graph.nodes:
        if node.meta.get("stack_trace") or _module(node.meta):  # the others were added by a pass
            history = node.meta.get("from_node")  # as generated code names the node
            known.setdefault(history[0].name if history else node.name, node.meta)
    found: dict[str, list[Call]] = {}
    calls: list[Call] = []
    nodes: list[str] = []
    for line in source.splitlines():
        if function := _FUNCTION.match(line):
            calls, nodes = found.setdefault(function[1], []), []
        elif named := _NODES.match(line):
            nodes = named[1].split(", ")
        elif called := _LAUNCH.match(line) or _OPERATOR.match(line):
            meta = next((known[name] for name in reversed(nodes) if name in known), {})
            name = called[called.lastindex or 1]
            made = (kernels.get(name, name), None) if called.re is _LAUNCH else (None, name)
            facts = (*made, _module(meta), source_line(meta.get("stack_trace")))
            calls.append(Call(*(fact and sys.intern(fact) for fact in facts)))  # most facts come again and again
            nodes = []
    parts = [name for name in found if name.startswith("partition_")] or ["call"]
    return tuple(tuple(found[name]) for name in parts if name in found)


def _module(meta: dict[str, Any]) -> str | None:
    if not (stack := meta.get("nn_module_stack") or meta.get("fwd_nn_module_stack")):
        return None
    path, kind = list(stack.values())[-1]
    inner = _ROOT.sub("", re.sub(r"\._modules\['([^']+)'\]", r".\1", path))
    return inner or (kind.rsplit(".", 1)[-1] if isinstance(kind, str) else str(kind.__name__))
