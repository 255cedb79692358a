"""Chooses the inputs of a function that are recorded at placeholder addresses, in ordinary memory, or staged.

:func:`choose` makes the :class:`.inputs.LiveInputs` of a recording, and gives the reason for each candidate that is
copied. Own memory of outputs counts as inputs. If the driver refuses placeholder addresses, mutated inputs are recorded
in ordinary memory, and the others are copied.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

from pygraph_trees.errors import DriverError
from pygraph_trees.reasons import Reason, Why

from .inputs import LiveInputs
from .live_input import Operand
from .placeholder import with_memory
from .retired import release_retired
from .routes import why_not_placeholder
from .staged_inputs import may_be_staged

if TYPE_CHECKING:
    from pygraph_trees.cuda.driver import Driver

    from .pool import PoolRanges


def choose(
    driver: Driver,
    device: int,
    inputs: list[Any],
    candidates: Sequence[int],
    mutated: Collection[int],
    pool: PoolRanges,
    refused: Mapping[int, Why],
    managed: Collection[int] = (),
    *,
    stage: bool = False,
    tabled: Collection[int] = (),
    overwritten: Collection[int] = (),
    own: Mapping[int, bool] = MappingProxyType({}),
) -> tuple[LiveInputs | None, dict[int, Why]]:
    """The inputs that can be recorded at placeholder addresses; for each other candidate, why it is copied.

    ``inputs`` does not change. If a driver call fails, all that was allocated is freed.

    Args:
        managed, tabled, overwritten, own: see :class:`.live_input.Operand`.
        stage: whether copies in the graph read inputs on the CPU, so that these may be staged.
    """
    release_retired(is_locked=True)  # upstream records under the capture lock
    at_placeholders: list[Operand] = []
    in_memory: dict[int, tuple[torch.Tensor, Why]] = {}  # mutated inputs, and why they are copied
    staged: dict[int, torch.Tensor] = {}
    reasons: dict[int, Why] = {}
    for index in candidates:
        value = inputs[index]
        if not isinstance(value, torch.Tensor):
            continue
        if stage and index not in refused and may_be_staged(value):
            staged[index] = value
            continue
        in_pool = index not in managed and value.is_cuda and pool.holds(value.data_ptr())
        why = refused.get(index) if stage and value.device.type == "cpu" else None
        why = why or why_not_placeholder(value, device, in_pool)
        if why is None and index not in refused:
            facts = index in mutated, index in overwritten, index in managed, index in tabled
            at_placeholders.append(Operand(index, value, *facts, own.get(index)))
        elif why is None and index in mutated:
            in_memory[index] = value, refused[index]
        else:
            reasons[index] = why or refused[index]
    if not (at_placeholders or in_memory or staged):
        return None, reasons
    try:
        return with_memory(lambda: LiveInputs(driver, device, at_placeholders, in_memory, staged, pool)), reasons
    except DriverError as error:
        why = Reason.NO_ADDRESSES(error=str(error))
    in_memory |= {operand.index: (operand.tensor, why) for operand in at_placeholders if operand.mutated}
    reasons |= {operand.index: why for operand in at_placeholders if not operand.mutated}
    return LiveInputs(driver, device, (), in_memory, staged, pool) if in_memory or staged else None, reasons
