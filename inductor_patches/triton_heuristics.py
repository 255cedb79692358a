"""Patch of ``torch._inductor.runtime.triton_heuristics``: launches of Inductor's Triton kernels.

``CachingAutotuner.run`` launches all of them. It is rebound only while a function is warmed up, or captured with a
table of addresses (:mod:`pygraph_trees.indirection.table.launches`). At all other times it is upstream's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

from .patch import Patch, Rebind, made_by

_MODULE = "torch._inductor.runtime.triton_heuristics"


@dataclass(frozen=True, slots=True)
class OnDemand(Rebind):
    """A rebinding that is offered to other code, and applied while that code needs it."""

    offer: Callable[[Callable[[], Callable[[], None]]], Callable[[], None]]  # returns the function that withdraws it

    def apply(self) -> Callable[[], None]:
        return self.offer(functools.partial(Rebind.apply, self))


def _offer(put_on: Callable[[], Callable[[], None]]) -> Callable[[], None]:
    from pygraph_trees.indirection.table.launches import tap

    return tap.offer(put_on)


PATCHES: tuple[Patch, ...] = (
    OnDemand(
        feature="table",
        module=_MODULE,
        name="CachingAutotuner.run",
        replace=made_by("pygraph_trees.indirection.table.launches", "watched"),
        offer=_offer,
        removable="never: torch has no indirect kernels",
    ),
)
