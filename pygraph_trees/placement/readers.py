"""The readers of CPU values: which GPU operators need a value, and when the program reads it.

Each function takes an ``fx.Node`` with its value under "val" and changes nothing. They describe the program, so they
must be asked before the graph is rewritten.
"""

from __future__ import annotations

import torch
from torch import fx

from pygraph_trees.cuda.host_reads import HostRead

from .nodes import aten, cpu_inputs, is_copy_between_devices, is_on_cpu, is_on_gpu, is_view, may_write, prims, reached
from .operators import Error, error_unless_it_jumps, may_wait

_WRITES = (aten.index_put.default, aten.index_put_.default)
_INDEX = (*_WRITES, aten.index.Tensor, aten.copy.default, aten.slice_scatter.default, aten._unsafe_index.Tensor)


def copies_to_gpu(node: fx.Node) -> bool:
    return is_copy_between_devices(node) and is_on_gpu(node) and any(cpu_inputs(node))


def needs(node: fx.Node) -> list[fx.Node]:
    """The CPU values that a GPU node reads and may find on either device."""
    if node.op != "call_function" or not is_on_gpu(node):
        return []
    return [source for source in cpu_inputs(node) if copies_to_gpu(node) or _may_be_anywhere(node, source)]


def _may_be_anywhere(node: fx.Node, source: fx.Node) -> bool:
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
    return target in _INDEX or (torch.Tag.pointwise in target.tags and source.meta["val"].dim() == 0)


def reader_that_jumps(node: fx.Node, error: Error) -> fx.Node | None:
    """A discontinuous GPU operator whose result depends on a CPU value with an error, but on no input of the graph."""
    errors, todo = {node: error}, [node]
    while todo:
        for user in filter(is_on_gpu, todo.pop().users):
            others = [source for source in user.all_input_nodes if source not in errors and is_on_gpu(source)]
            if user in errors or any(n.op == "placeholder" for n in reached(others, lambda n: n.all_input_nodes)):
                continue
            given = max(errors.get(source, Error.NONE) for source in user.all_input_nodes)
            if (found := error_unless_it_jumps(user, given)) is None:
                return user
            errors[user] = found
            todo.append(user)
    return None


def when_read(node: fx.Node) -> HostRead:
    """When a program that never waits for its stream reads a value, directly or through views."""
    values = itself_and_views(node)
    reads = [(value, user) for value in values for user in value.users if not is_view(user) or may_write(user)]
    if reads and all(is_copy_between_devices(user) and _is_non_blocking(user) for _, user in reads):
        return HostRead.LATER
    return HostRead.AT_ONCE if all(_is_read_at_once(value, user) for value, user in reads) else HostRead.IN_ORDER


def waits_for_stream(node: fx.Node) -> bool:
    """Whether an operator copies between devices and waits for the copy, and so for all earlier ones."""
    if is_copy_between_devices(node):
        return not _is_non_blocking(node)
    if node.op == "call_function" and is_on_cpu(node) and any(map(is_on_gpu, node.all_input_nodes)):
        return not (node.target is aten.copy.default and _is_non_blocking(node))
    return may_wait(node) or any(not _is_read_at_once(source, node) for source in needs(node))


def itself_and_views(node: fx.Node) -> list[fx.Node]:
    return reached([node], lambda value: filter(is_view, value.users))


def _is_read_at_once(value: fx.Node, user: fx.Node) -> bool:
    """Whether an operator reads a CPU value when it is called: a CPU operator, or one that takes the value as a number.

    Other GPU operators copy the value in stream order.
    """
    if is_on_cpu(user):
        return True
    tags = user.target.tags if isinstance(user.target, torch._ops.OpOverload) else ()
    is_number = value.meta["val"].dim() == 0 and torch.Tag.pointwise in tags
    return is_number and user.target is not aten.where.self  # `where` copies the number


def _is_non_blocking(copy: fx.Node) -> bool:
    third = copy.target in (prims.device_put.default, aten.copy.default) and len(copy.args) > 2
    given = copy.args[2] if third else None
    return bool(copy.kwargs.get("non_blocking", given))
