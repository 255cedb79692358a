"""Routes: how each live input of a recording is given to its replays, and why an input is copied.

The rules are functions of plain facts: :func:`why_not_placeholder` before an input is recorded, :func:`decide` after
the captured graph is scanned, :func:`fits` for a changed address at a replay. All consumers of an input agree. The
route is table if a kernel reads the address from a slot; kernels that hold it are patched. A reason is worded to follow
"because".
"""

from __future__ import annotations

import enum
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from pygraph_trees.cuda.graph_nodes import KernelNode
from pygraph_trees.reasons import Reason, Why

if TYPE_CHECKING:
    from .relocations import Scan

MAX_ALIGNMENT = 512  # bytes; no kernel is chosen by a larger alignment
VECTOR = 16  # bytes; the largest load


class Route(enum.Enum):
    PATCH = "patch"
    TABLE = "table"  # patched too: in the kernel that writes the table, and in kernels that do not read the table
    COPY = "copy"
    STAGE = "stage"  # from the CPU: held by a node of the graph, or copied by one from pinned memory


@dataclass(frozen=True, slots=True)
class Decision:
    route: Route
    reason: Why | None = None  # why it is copied

    @property
    def by_address(self) -> bool:
        return self.route is Route.PATCH or self.route is Route.TABLE


def why_not_placeholder(tensor: torch.Tensor, device: int, in_pool: bool) -> Why | None:
    """Why a live input, which may be in the graph pool, cannot be recorded at a placeholder address; None if it can."""
    if not tensor.is_cuda or tensor.get_device() != device:
        return Reason.ELSEWHERE(device=tensor.device)
    if tensor.layout is not torch.strided:
        return Reason.LAYOUT(layout=tensor.layout)
    if tensor.numel() == 0:
        return Reason.EMPTY()
    if tensor._is_zerotensor():
        return Reason.ZEROS()
    # Bits of the tensor that an address does not carry and that a copy resolves.
    if tensor.is_conj():
        return Reason.CONJUGATE()
    if tensor.is_neg():
        return Reason.NEGATED()
    return Reason.IN_POOL() if in_pool else None


def decide(
    scan: Scan,
    count: int,
    passed_through: Collection[int],
    writers: Collection[int] = (),
    read: Collection[int] = (),
    copied_to: Collection[int] = (),
) -> list[Decision]:
    """The route of each of ``count`` placeholders.

    Args:
        passed_through: inputs that are returned, so that no node has to hold their addresses.
        writers: the nodes that write the recording's table.
        read: the placeholders whose address a kernel reads in the table.
        copied_to: inputs that were only given to our own copies, so that no other node can hide their addresses.
    """
    written = {relocation.input for relocation in scan.relocations if relocation.node in writers}
    with_relocation = {relocation.input for relocation in scan.relocations if relocation.node not in writers}
    decisions = []
    for index in range(count):
        why = scan.refused.get(index)
        if why is None and scan.opaque is not None and index not in copied_to:
            why = Reason.HIDDEN(node=scan.opaque)
        if why is None and index in read and index not in written:
            why = Reason.SLOT_UNWRITTEN()
        if why is None and not (index in with_relocation or index in read or index in passed_through):
            why = Reason.UNHELD()
        route = Route.COPY if why is not None else Route.TABLE if index in read else Route.PATCH
        decisions.append(Decision(route, why))
    return decisions


def alignments(scan: Scan, starts: Mapping[int, int]) -> dict[int, int]:
    """The largest alignment in bytes of a pointer into each placeholder that a kernel holds: 1 to 512."""
    found = dict.fromkeys(starts, 1)
    for relocation in scan.relocations:
        if relocation.input in found and isinstance(scan.nodes[relocation.node], KernelNode):
            alignment = math.gcd(starts[relocation.input] + relocation.addend, MAX_ALIGNMENT)
            found[relocation.input] = max(found[relocation.input], alignment)
    return found


def fits(address: int, recorded: int, aligned: int = 1) -> bool:
    """Whether a graph recorded at one address may be given another.

    Kernels are chosen by alignment, so the new address must be as aligned as the recorded one, up to 512, and so must
    pointers into the middle of an input (``aligned``: see :func:`alignments`). For an alignment below 16, a kernel may
    have been told how many elements precede the first aligned one; then both addresses must be equal modulo 16.
    """
    return (address - recorded) % max(math.gcd(recorded, MAX_ALIGNMENT), VECTOR, aligned) == 0


def is_better(address: int, recorded: int) -> bool:
    """Whether vectors can be read at an address, but not where the graph was recorded.

    Flash attention reads the wrong elements there, in eager mode too, so an aligned input must not be copied there.
    """
    return recorded % VECTOR != 0 and address % VECTOR == 0
