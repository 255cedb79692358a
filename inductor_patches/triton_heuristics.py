"""Patch of ``torch._inductor.runtime.triton_heuristics``: how a Triton kernel of Inductor's is launched.

``CachingAutotuner.run`` launches every one of them. It is rebound only while a function is warmed up or captured that
has a table of addresses (:mod:`pygraph_trees.indirection.table.launches`); at all other times it is upstream's own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .patch import Patch, Rebind

_MODULE = "torch._inductor.runtime.triton_heuristics"


@dataclass(frozen=True, slots=True)
class OnDemand(Rebind):
    """A rebinding that is offered to those who need it, and is on while they do."""

    offer: Callable[[Callable[[], Callable[[], None]]], Callable[[], None]]  # returns what withdraws it

    def apply(self) -> Callable[[], None]:
        return self.offer(functools.partial(Rebind.apply, self))


def _run(upstream: Callable[..., Any]) -> Callable[..., Any]:
    from pygraph_trees.indirection.table.launches import watched

    return watched(upstream)


def _offer(put_on: Callable[[], Callable[[], None]]) -> Callable[[], None]:
    from pygraph_trees.indirection.table.launches import tap

    return tap.offer(put_on)


PATCHES: tuple[Patch, ...] = (
    OnDemand(
        feature="table",
        module=_MODULE,
        name="CachingAutotuner.run",
        replace=_run,
        offer=_offer,
        removable="never: torch has no indirect kernels",
    ),
)
