"""The rule that chooses a recording's route: its inputs are patched unless a table pays.

A table pays if at least 16 kernels with variants hold at least 4 inputs whose addresses change in at least a quarter of
the replays, and if most of the first eight sampled replays are host-bound. :func:`choose_route` decides from these
:class:`Facts`. A choice is kept for a function and its sizes, even if the function is recorded again; its log gets each
choice as a sentence.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any

from .table import builds
from .table.pointer_table import taken_by_variants

SAMPLES = 8
LEAST_KERNELS = 16
LEAST_INPUTS = 4
LEAST_SHARE = 0.25  # of replays with new addresses; inputs that move less often count as staying


class Reason(Enum):
    """What a choice rests on; the value is its phrase in the report, after "inputs are passed"."""

    SELDOM = "by address: addresses change in {share:.0%} of replays, fewer than {least_share:.0%}"
    FEW_INPUTS = (
        "by address: the addresses of {inputs} inputs that a table could hold change, fewer than {least_inputs}"
    )
    FEW_KERNELS = "by address: {kernels} kernels could read inputs from a table, fewer than {least_kernels}"
    GPU_BOUND = (
        "by address: the GPU was idle before {host_bound} of {samples} sampled replays, which is not most of them"
    )
    TABLE_AWAITED = "by address, until a table for {kernels} kernels that read {inputs} inputs is built"
    TABLE = (
        "by table: {kernels} kernels read {inputs} inputs whose addresses change, "
        "and the GPU was idle before {host_bound} of {samples} sampled replays"
    )
    NOT_COMPILED = "by address: no kernel could be compiled to read a table"
    NOT_RECORDED = "by address: recording it with a table failed: {error}"
    NOT_READ = "by address: a table is built, but this recording cannot use it"


BY_TABLE = (Reason.TABLE_AWAITED, Reason.TABLE)


@dataclass(frozen=True, slots=True)
class Facts:
    """Facts about one recording's replays."""

    kernels: int = 0  # nodes of kernels with variants that hold inputs whose addresses change
    inputs: int = 0  # inputs whose addresses change and that a table could hold
    host_bound: int = 0  # sampled replays before which the GPU was idle
    share: float = 1.0  # of replays in which addresses change


@dataclass(frozen=True, slots=True)
class Choice:
    reason: Reason
    facts: Facts = Facts()
    error: str = ""

    def __str__(self) -> str:
        least = {"least_kernels": LEAST_KERNELS, "least_inputs": LEAST_INPUTS, "least_share": LEAST_SHARE}
        return self.reason.value.format(**asdict(self.facts), **least, samples=SAMPLES, error=self.error)


def choose_route(facts: Facts) -> Choice:
    if facts.share < LEAST_SHARE:
        return Choice(Reason.SELDOM, facts)
    if facts.inputs < LEAST_INPUTS:
        return Choice(Reason.FEW_INPUTS, facts)
    if facts.kernels < LEAST_KERNELS:
        return Choice(Reason.FEW_KERNELS, facts)
    if 2 * facts.host_bound <= SAMPLES:
        return Choice(Reason.GPU_BOUND, facts)
    return Choice(Reason.TABLE_AWAITED, facts)


# By function and its sizes.
_choices: weakref.WeakKeyDictionary[Any, dict[Hashable, Choice]] = weakref.WeakKeyDictionary()


def choice_of(function: Any, sizes: Hashable) -> Choice | None:
    return _choices.get(function, {}).get(sizes)


def may_use_table(function: Any, sizes: Hashable) -> bool:
    """Whether a recording may get a table: true unless replays with these sizes were found not to need one."""
    choice = choice_of(function, sizes)
    return choice is None or choice.reason in BY_TABLE


def leave_table(function: Any, sizes: Hashable, error: BaseException) -> None:
    """Gives up the function's table for good, after a recording with it failed."""
    builds.give_up(function)
    take_choice(function, sizes, Choice(Reason.NOT_RECORDED, error=str(error)))


def recorded(function: Any, sizes: Hashable, *, reads_table: bool) -> None:
    """Notes whether a new recording reads the table that was built for its function."""
    if not builds.is_over(function) or not taken_by_variants(function) or not may_use_table(function, sizes):
        return
    wanted = [choice for choice in list(_choices.get(function, {}).values()) if choice.reason in BY_TABLE]
    if not wanted:
        return
    if reads_table:
        take_choice(function, sizes, Choice(Reason.TABLE, (choice_of(function, sizes) or wanted[0]).facts))
    else:
        _tell(function, Choice(Reason.NOT_READ))


def take_choice(function: Any, sizes: Hashable, choice: Choice) -> None:
    _choices.setdefault(function, {})[sizes] = choice
    _tell(function, choice)


def _tell(function: Any, choice: Choice) -> None:
    function.log.route_was_found(str(choice), awaits_table=choice.reason is Reason.TABLE_AWAITED)
