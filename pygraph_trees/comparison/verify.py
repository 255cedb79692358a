"""Whether a function compiled with CUDA graphs does what it does without: :func:`verify`, for a person with a doubt.

Both run on arguments that lie elsewhere at each call, while those of the calls before are spoilt: what a graph still
reads at an old address shows. Nothing of the caller is changed: arguments are copied, a module too.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch._inductor.utils import clone_preserve_strides
from torch.utils import _pytree as pytree

from ..exc import PygraphError
from ..extent import flat
from .differences import difference, snapshot
from .program import Program
from .ways import make_ways


class DiffersUngraphed(PygraphError):
    template = "call {call}: with CUDA graphs {name} is not what it is without: {how}"


def verify(fn: Callable[..., Any], *args: Any, calls: int = 5, **kwargs: Any) -> None:
    """Compares a function under CUDA graphs with the same function compiled without.

    Args:
        fn: a module or function that is not compiled yet; a module is copied.
        args, kwargs: its arguments; tensors in them are copied for each call, with their strides.
        calls: how often it is called; the first warms up, the second records.

    Raises:
        DiffersUngraphed: an output or an argument that is written to differs in any bit.
        ValueError: fewer than three calls, which replay nothing.
    """
    if calls < 3:
        raise ValueError(f"the first two calls replay nothing: expected at least 3 calls, got {calls}")
    ways = []
    for kind in ("compile", "ours"):
        own = copy.deepcopy(fn) if isinstance(fn, torch.nn.Module) else fn
        ways += make_ways(Program(own), [kind])
    spoilt: list[list[Any]] = [[] for _ in ways]  # kept alive, so that their addresses are not given out again
    for call in range(calls):
        seen = []
        for way, old in zip(ways, spoilt, strict=True):
            given, named = pytree.tree_map(_elsewhere, (args, kwargs))
            with way.active():
                torch.manual_seed(call)
                torch.compiler.cudagraph_mark_step_begin()
                outputs = way.callable(*given, **named)
                seen.append(snapshot({"output": outputs, "argument": (given, named)}))
            for tensor in pytree.tree_leaves((given, named)):
                _spoil(tensor)
            old.append((given, named))
        wanted, found = seen
        for one, other in zip(found, wanted, strict=True):
            apart = difference([one], [other])
            if apart.problem is not None or apart.largest:
                raise DiffersUngraphed(call=call, name=one[0], how=apart.problem or f"off by up to {apart.largest:.3g}")
    for way in ways:
        if way.trees is not None:
            way.trees.clear()


def _elsewhere(value: Any) -> Any:
    if not isinstance(value, torch.Tensor) or value.numel() == 0:
        return value
    return clone_preserve_strides(value.detach()).requires_grad_(value.requires_grad)


def _spoil(value: Any) -> None:
    if isinstance(value, torch.Tensor) and value.numel():
        with torch.no_grad():
            flat(value).fill_(float("nan") if value.is_floating_point() or value.is_complex() else 0)
