"""Facts about a node of a post-grad graph: where its value is, how large it is, and whose memory it shares.

Each function takes an ``fx.Node`` with its value under "val". What operators compute is a matter of ``operators.py``.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch import fx
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.utils import _pytree as pytree

aten, prims = torch.ops.aten, torch.ops.prims
HALVES = frozenset({torch.float16, torch.bfloat16})


def named(names: str, *others: Any) -> frozenset[Any]:
    """ATen's operators with these names, separated by spaces, and others; each stands for all of its overloads."""
    return frozenset([*(getattr(aten, name) for name in names.split()), *others])


# Their results are elements of their first input. `view` is not among them, as it may read the bytes as another type.
REARRANGES = named(
    "lift_fresh_copy clone alias detach _unsafe_view reshape expand permute t transpose squeeze unsqueeze select slice "
    "flip repeat"
)
_MAY_BE_VIEWS = named("_unsafe_view reshape contiguous")
# Operators that copy a tensor to another device, possibly to another type.
_COPIES = (aten._to_copy.default, prims.device_put.default, aten.to.device)
_T = TypeVar("_T")


def reached(starts: Iterable[_T], following: Callable[[_T], Iterable[_T]]) -> list[_T]:
    """These items, the ones that follow any of them, and so on, each once."""
    found = list(dict.fromkeys(starts))
    seen = set(found)
    for item in found:
        new = [other for other in dict.fromkeys(following(item)) if other not in seen]
        found += new
        seen.update(new)
    return found


def tensors_of(node: fx.Node) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(node.meta.get("val")) if isinstance(leaf, torch.Tensor)]


def device_of(node: fx.Node) -> torch.device | None:
    """The device of the node's value; None if the value has no tensors or is on several devices."""
    devices = {tensor.device for tensor in tensors_of(node)}
    return devices.pop() if len(devices) == 1 else None


def is_on_cpu(node: fx.Node) -> bool:
    return getattr(device_of(node), "type", None) == "cpu"


def is_on_gpu(node: fx.Node) -> bool:
    return getattr(device_of(node), "type", None) == "cuda"


def nbytes_of(node: fx.Node) -> int | float:
    """The size of the node's tensors in bytes; infinity if a size is unknown."""
    counts: list[tuple[Any, int]] = [(tensor.numel(), tensor.element_size()) for tensor in tensors_of(node)]
    hints = ((count if isinstance(count, int) else count.node.hint, nbytes) for count, nbytes in counts)
    return sum(math.inf if hint is None else int(hint) * nbytes for hint, nbytes in hints)


def cpu_inputs(node: fx.Node) -> list[fx.Node]:
    """The node's inputs that are on the CPU, each once."""
    return list(filter(is_on_cpu, node.all_input_nodes))


def tensors_given(node: fx.Node) -> list[torch.Tensor]:
    return [tensor for source in node.all_input_nodes for tensor in tensors_of(source)]


def is_integral(tensor: torch.Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex())


def packet_of(node: fx.Node) -> Any:
    """The node's operator with all of its overloads; None if it calls none of torch's operators."""
    return getattr(node.target, "overloadpacket", None)


def is_constructor(node: fx.Node) -> bool:
    """Whether the node makes a tensor from numbers alone."""
    is_operator = node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload)
    return is_operator and "device" in node.kwargs and not tensors_given(node)


def held_tensor(node: fx.Node) -> torch.Tensor | None:
    """The plain CPU tensor that a ``get_attr`` node names; None if it names anything else."""
    found: Any = node.graph.owning_module if node.op == "get_attr" else None
    for name in str(node.target).split(".") if found is not None else ():
        found = getattr(found, name, None)
    plain = type(found) in (torch.Tensor, torch.nn.Parameter) and found.device.type == "cpu"
    if not plain or found.layout != torch.strided:
        return None
    with unset_fake_temporarily(), torch.inference_mode(False):
        return found.detach()


def is_copy_between_devices(node: fx.Node) -> bool:
    source = node.args[0] if node.op == "call_function" and node.target in _COPIES and node.args else None
    devices = {device_of(source), device_of(node)} if isinstance(source, fx.Node) else set()
    return len(devices) == 2 and None not in devices


def is_view(node: fx.Node) -> bool:
    """Whether the node's value may share memory with an input."""
    target = node.target
    if node.op != "call_function":
        return False
    if not isinstance(target, torch._ops.OpOverload):
        return True  # one item of several, or an unknown function
    return any(a.alias_info is not None for a in target._schema.arguments) or packet_of(node) in _MAY_BE_VIEWS


def may_write(node: fx.Node) -> bool:
    """Whether an operator may write to its inputs, as unknown functions may."""
    target = node.target
    return target._schema.is_mutable if isinstance(target, torch._ops.OpOverload) else target is not operator.getitem


def is_a_whole(node: fx.Node) -> bool:
    """Whether a dense copy can stand for the value: it is no view, or a dense view of a dense input.

    Generated code finds a view inside the memory of its base, by the base's strides. A dense copy of a base with gaps
    has other strides, and Inductor may leave gaps in values that the CPU computes.
    """
    if not _shows_another(node):
        return True
    views = _views(node)
    return views[-1].op == "placeholder" and all(is_dense(t) for view in views for t in tensors_of(view))


def is_row_of_input(node: fx.Node) -> bool:
    """Whether the node is a dense view of an input with gaps."""
    views = _views(node)
    return views[-1].op == "placeholder" and not is_a_whole(node) and all(map(is_dense, tensors_of(node)))


def _views(node: fx.Node) -> list[fx.Node]:
    """The node, its base, the base of that and so on, up to the first view of several tensors or unknown function."""
    found = [node]
    while _shows_another(found[-1]) and (packet_of(found[-1]) or found[-1].target is operator.getitem):
        sources = [source for source in found[-1].all_input_nodes if tensors_of(source)]
        if len(sources) != 1:
            break
        found.append(sources[0])
    return found


def _shows_another(node: fx.Node) -> bool:
    """Whether the node is a view; one item of several is a view if the node that gives them is."""
    is_item = node.target is operator.getitem
    return is_view(node.all_input_nodes[0] if is_item else node)


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements fill their memory without gaps, each once; for symbolic sizes, only in the given order."""
    dims = [*zip(tensor.stride(), tensor.shape, strict=True)]
    if all(isinstance(number, int) for dim in dims for number in dim):
        dims.sort(reverse=True)
    expected: Any = 1
    for stride, size in reversed(dims):
        if not statically_known_true(size == 1):
            if not statically_known_true(stride == expected):
                return False
            expected = expected * size
    return True
