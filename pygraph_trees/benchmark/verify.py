"""Compares the outputs of two ways of running a program, and verifies CUDA graphs by it.

:func:`differences` compares :func:`snapshot` objects tensor by tensor. :func:`verify` runs a function with and without
CUDA graphs on copies of its arguments, at other addresses in each call; it overwrites those of earlier calls, which
reveals a graph that still reads an old address.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
import torch._inductor.config
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from pygraph_trees.cuda.extent import flat, tensors_with_memory
from pygraph_trees.errors import PygraphError
from pygraph_trees.indirection.live_input import copy_at
from pygraph_trees.report.log import journal

from .inspection import recordings
from .program import Program, tensors_of
from .ways import Way, make_ways

NO_GPU = "this needs a GPU, and torch can use none here"
_CHUNK = 1 << 26  # elements compared at once: a few temporaries of half a gigabyte

Snapshot = Sequence[tuple[str, torch.Tensor]]


class DiffersUngraphed(PygraphError):
    template = "call {call}: with CUDA graphs {name} is not what it is without: {how}"


class NothingVerified(PygraphError):
    template = "nothing was verified: {why}"


def snapshot(outputs: Any) -> Snapshot:
    """Clones of all tensors in ``outputs``, which survive the next call, with the paths of ``tensors_of``."""
    return [(name, _plain(tensor.detach()).clone()) for name, tensor in tensors_of(outputs)]


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.resolve_conj().resolve_neg() if tensor.layout == torch.strided else tensor.to_dense()


def differences(outputs: Snapshot, reference: Snapshot) -> Iterator[tuple[str, float | str]]:
    """Each tensor's name and largest absolute difference (NaNs may be equal), or the problem as text."""
    names, expected = [n for n, _ in outputs], [n for n, _ in reference]
    if names != expected:
        found, wanted = (f"({', '.join(n[:3])}{', ...' if len(n) > 3 else ''})" for n in (names, expected))
        yield "what it returns", f"{len(names)} output tensors {found}, expected {len(expected)} {wanted}"
        return
    for (name, ours), (_, theirs) in zip(outputs, reference, strict=True):
        yield name, _difference(f"output{name}", ours, theirs)


def _difference(output: str, ours: torch.Tensor, theirs: torch.Tensor) -> float | str:
    for what in ("shape", "dtype", "device"):
        found, wanted = getattr(ours, what), getattr(theirs, what)
        if found != wanted:
            return f"{output} has {what} {found}, expected {wanted}"
    if ours.is_complex():
        ours, theirs = torch.view_as_real(ours), torch.view_as_real(theirs)
    wide = torch.float64 if ours.dtype == torch.float64 or not ours.is_floating_point() else torch.float32
    largest = 0.0
    for mine, other in zip(ours.reshape(-1).split(_CHUNK), theirs.reshape(-1).split(_CHUNK), strict=True):
        if mine.numel() == 0:
            continue
        x, y = mine.to(wide), other.to(wide)
        same = (x == y) | (x.isnan() & y.isnan())
        apart = torch.where(same, 0.0, (x - y).abs()).max().item()
        if not apart < float("inf"):
            return f"{output} has NaN or infinity where the reference has none, or lacks one"
        largest = max(largest, apart)
    return largest


def verify(fn: Callable[..., Any], *args: Any, calls: int = 5, **kwargs: Any) -> None:
    """Does what :func:`pygraph_trees.verify` says; raises :class:`DiffersUngraphed` or :class:`NothingVerified`.

    A module, not compiled yet, is copied; tensors in the arguments are copied for each call, with their strides. The
    first of the ``calls`` warms up, the second records, and at least one must follow.
    """
    if calls < 3:
        raise ValueError(f"the first two calls replay nothing: expected at least 3 calls, got {calls}")
    if not torch.cuda.is_available():
        raise NothingVerified(why=NO_GPU)
    graphs_before, functions_before = map(len, journal.records())
    ways: list[Way] = []
    for kind in ("compile", "ours:graphed"):
        own = copy.deepcopy(fn) if isinstance(fn, torch.nn.Module) else fn
        ways += make_ways(Program(own), [kind])
    try:
        with torch.random.fork_rng(range(torch.cuda.device_count()), device_type="cuda"):
            _compare(ways, args, kwargs, calls)
        if not any(recordings(way.managers) for way in ways):
            compiled, functions = journal.records()
            reasons = [graph.dropped for graph in compiled[graphs_before:]]
            reasons += [function.ungraphed_reason for function in functions[functions_before:]]
            why = "; ".join(dict.fromkeys(filter(None, reasons))) or "nothing of it was compiled for a GPU"
            raise NothingVerified(why=f"no part of it ran in a CUDA graph ({why})")
    finally:
        for way in ways:
            if way.trees is not None:
                way.trees.clear()


def _compare(ways: Sequence[Way], args: Any, kwargs: Any, calls: int) -> None:
    spoilt: list[Any] = []  # kept alive, so that their addresses are not reused
    own = _storages((args, kwargs))
    for call in range(calls):
        seen = []
        for way in ways:
            given, named = pytree.tree_map(_elsewhere, (args, kwargs))
            # Both must use the same kernels, whatever else is being tuned in the meantime. Set at each call, because
            # torch turns it off after a compilation.
            with way.active(), torch._inductor.config.patch("deterministic", True):
                torch.manual_seed(call)
                torch.compiler.cudagraph_mark_step_begin()
                outputs = way.callable(*given, **named)
                seen.append(snapshot({"output": outputs, "argument": (given, named)}))
                del outputs
            for tensor in pytree.tree_leaves((given, named)):
                _spoil(tensor, own)
            spoilt.append((given, named))
        wanted, found = seen
        for name, apart in differences(found, wanted):
            if apart:
                how = apart if isinstance(apart, str) else f"off by up to {apart:.3g}"
                raise DiffersUngraphed(call=call, name=name, how=how)


def _elsewhere(value: Any) -> Any:
    """A copy with the same strides, and with the same alignment if the tensor has memory itself and reads as it."""
    if not isinstance(value, torch.Tensor) or value.numel() == 0:
        return value
    is_wrapped = is_traceable_wrapper_subclass(value)  # then it has no memory itself
    if is_wrapped or value.layout is not torch.strided or value.is_conj() or value.is_neg():
        return value.detach().clone().requires_grad_(value.requires_grad)
    return copy_at(value, value.data_ptr() % 512).requires_grad_(value.requires_grad)


def _storages(values: Any) -> frozenset[int]:
    """What identifies the storages of tensors, and of those in wrapper subclasses."""
    tensors = itertools.chain.from_iterable(map(tensors_with_memory, pytree.tree_leaves(values)))
    return frozenset(tensor.untyped_storage()._cdata for tensor in tensors if tensor.layout is torch.strided)


def _spoil(value: Any, own: Collection[int]) -> None:
    """Overwrites a copy, except storages of the program's ``own``: a nested tensor's clone shares the offsets."""
    for tensor in tensors_with_memory(value):
        if tensor.layout is torch.strided and tensor.numel() and tensor.untyped_storage()._cdata not in own:
            with torch.no_grad():
                flat(tensor).fill_(float("nan") if tensor.is_floating_point() or tensor.is_complex() else 0)
