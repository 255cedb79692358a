"""Routes: how each live input of a recording is given to its replays, and why one is copied.

Rules over plain facts, in the order in which they are asked: :func:`why_not_placeholder` before an input is recorded at
a placeholder address, :func:`decide` when the captured graph was scanned, :func:`fits` at a replay, for a changed
address. All consumers of an input agree: it is given by address everywhere, or copied. The route is called table where
a kernel reads the address from a slot of the recording's table; others may hold it themselves, and are patched beside
the one that writes the table. A reason is a phrase that reads on after "because".
"""

from __future__ import annotations

import enum
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from pygraph_trees.cuda.graph_nodes import KernelNode

if TYPE_CHECKING:
    from .relocations import Scan

MAX_ALIGNMENT = 512  # bytes; no kernel is chosen by more
_VECTOR = 16  # bytes that one load moves at most


class Route(enum.Enum):
    PATCH = "patch"
    TABLE = "table"  # patched too: in what writes the table, and where a kernel does not read it there
    COPY = "copy"
    STAGE = "stage"  # through pinned memory, by a copy in the graph


@dataclass(frozen=True, slots=True)
class Decision:
    route: Route
    reason: str | None  # why it is copied; None for a patch

    @property
    def by_address(self) -> bool:
        return self.route is Route.PATCH or self.route is Route.TABLE


@dataclass(frozen=True, slots=True)
class Slots:
    """What a scan found of a recording's table."""

    writers: frozenset[int]  # nodes that write it
    read: frozenset[int]  # placeholders that a kernel reads there


_PATCH = Decision(Route.PATCH, None)
_TABLE = Decision(Route.TABLE, None)
NO_SLOTS = Slots(frozenset(), frozenset())


def why_not_placeholder(tensor: torch.Tensor, device: int, in_pool: bool) -> str | None:
    """Why a live input cannot be recorded at a placeholder address on a CUDA device, None where it can.

    Args:
        in_pool: whether its memory lies in the graph pool, which a replay overwrites.
    """
    if not tensor.is_cuda or tensor.get_device() != device:
        return f"it is on {tensor.device}"
    if tensor.layout is not torch.strided:
        return f"its layout is {tensor.layout}"
    if tensor.numel() == 0:
        return "it has no elements"
    if tensor._is_zerotensor():
        return "it is a tensor of zeros without memory"
    # Bits of the tensor, which an address does not carry and a copy resolves.
    if tensor.is_conj():
        return "it is a conjugate view"
    if tensor.is_neg():
        return "it is a negated view"
    if in_pool:
        return "it lies in the graph pool"
    return None


def decide(scan: Scan, count: int, passed_through: Collection[int], slots: Slots = NO_SLOTS) -> list[Decision]:
    """The route of each of ``count`` placeholders; one that is passed through is returned, so no node need hold it."""
    written = {relocation.input for relocation in scan.relocations if relocation.node in slots.writers}
    with_relocation = {relocation.input for relocation in scan.relocations if relocation.node not in slots.writers}
    decisions = []
    for index in range(count):
        why = scan.refused.get(index)
        if why is None and scan.opaque is not None:
            why = f"{scan.opaque} may hide its address"
        if why is None and index in slots.read and index not in written:
            why = "no node writes its slot"
        if why is None and not (index in with_relocation or index in slots.read or index in passed_through):
            why = "no node holds its address"
        given = _TABLE if index in slots.read else _PATCH
        decisions.append(given if why is None else Decision(Route.COPY, why))
    return decisions


def alignments(scan: Scan, starts: Mapping[int, int]) -> dict[int, int]:
    """By placeholder, in bytes: how aligned the most aligned pointer is that a kernel holds of it, up to 512; 1 without
    one.

    Args:
        starts: where they begin, by placeholder.
    """
    found = dict.fromkeys(starts, 1)
    for relocation in scan.relocations:
        if relocation.input in found and isinstance(scan.nodes[relocation.node], KernelNode):
            alignment = math.gcd(starts[relocation.input] + relocation.addend, MAX_ALIGNMENT)
            found[relocation.input] = max(found[relocation.input], alignment)
    return found


def fits(address: int, recorded: int, aligned: int = 1) -> bool:
    """Whether a graph recorded at one address may be given another.

    Kernels are chosen by alignment, so it must be as aligned as the recorded one, up to 512. Below 16 a kernel may have
    been told how many elements come before the first aligned one: then both are the same modulo 16.

    Args:
        aligned: bytes that pointers which kernels hold of the input are aligned to (see :func:`alignments`): one into
            the middle of it may be more aligned than its first element, and must stay so.
    """
    return (address - recorded) % max(math.gcd(recorded, MAX_ALIGNMENT), _VECTOR, aligned) == 0
