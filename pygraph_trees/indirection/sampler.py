"""Samples about one in 128 of a recording's replays with new addresses, to choose its route.

A :class:`Sampler` collects the facts from which the rule (:mod:`.route_rule`) decides, once. If a table pays, each
further sample takes one step of building the variants (:mod:`.table.builds`), and the last one asks for a recording
with the table. Otherwise sampling ends. A sample never waits for the GPU and never raises.
"""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Callable, Collection, Hashable, Iterable
from typing import Any, Protocol

import torch

from pygraph_trees.cuda.progress import is_over

from .route_rule import (
    BY_TABLE,
    LEAST_INPUTS,
    LEAST_KERNELS,
    SAMPLES,
    Choice,
    Facts,
    Reason,
    choice_of,
    choose_route,
    may_use_table,
    take_choice,
)
from .table import builds
from .table.pointer_table import readers_of

EVERY = 128  # replays with new addresses from one sample to the next

_PATIENCE = 64  # samples for which a function whose variants are built waits for other functions

_log = logging.getLogger("pygraph_trees.indirection")

KernelNames = Callable[[Collection[int]], Iterable[str | None]]  # of the nodes that hold an address of these inputs


class Counted(Protocol):
    @property
    def replays(self) -> int: ...


class Sampler:
    """Samples the replays of one recording whose inputs are patched, until its route is chosen and used."""

    def __init__(self, function: Any, sizes: Hashable, device: int, log: Counted) -> None:
        """``function``: its ``log`` gets the choice. ``log``: counts the recording's replays."""
        self.ready: Callable[[str], None] | None = None  # called with a reason if it must be recorded again
        self._function, self._sizes = weakref.ref(function), sizes
        self._device, self._log = device, log
        # Due before C++ leaves the next replay to Python, which it does for every 128th with new addresses.
        self._next: float = EVERY // 2
        self._patience = _PATIENCE
        self._samples = self._host_bound = 0
        self._due = 0  # replays at which a sample was due
        self._moved: set[int] = set()
        self._first = (0, 0)  # replays, and nodes set, before the first sample
        self._set_nodes = 0  # in all sampled replays

    def can_choose(self, indices: Collection[int], names: KernelNames) -> bool:
        """Whether replays are worth a sample: the recording has enough kernels and inputs, or a choice."""
        function = self._function()
        if function is None:
            return False
        kernels, inputs = _count(function, indices, names)
        return choice_of(function, self._sizes) is not None or (kernels >= LEAST_KERNELS and inputs >= LEAST_INPUTS)

    def is_due(self) -> bool:
        return self._log.replays >= self._next

    def sample(self, moved: Collection[int], set_nodes: int, set_calls: int, names: KernelNames) -> bool:
        """Takes a sample between patching and launch. It may load a kernel or start a process, and never raises.

        Args:
            moved: indices of the inputs whose addresses differ from the previous replay's.
            set_nodes: the number of nodes set for this replay.
            set_calls: the number of nodes set for all replays so far.

        Returns whether it needs more samples.
        """
        try:
            return self._sample(moved, set_nodes, set_calls, names)
        except Exception as error:
            _log.warning("inputs are patched, because their route was not chosen: %s: %s", type(error).__name__, error)
            return False

    def _sample(self, moved: Collection[int], set_nodes: int, set_calls: int, names: KernelNames) -> bool:
        function, replays = self._function(), self._log.replays
        if function is None:
            return False
        self._next = replays + EVERY // 2
        self._due += 1
        if not moved or torch.cuda.is_current_stream_capturing():
            return True
        choice = choice_of(function, self._sizes)
        if choice is not None:
            return choice.reason in BY_TABLE and self._go_on(function)
        self._first = self._first if self._samples else (replays, set_calls)
        self._samples += 1
        self._host_bound += is_over(torch.cuda.current_stream(self._device))
        self._moved.update(moved)
        self._set_nodes += set_nodes
        if self._samples < SAMPLES:
            return True
        share = self._share(replays, set_calls)
        choice = choose_route(Facts(*_count(function, self._moved, names), self._host_bound, share))
        take_choice(function, self._sizes, choice)
        if choice.reason is not Reason.TABLE_AWAITED:
            return False
        builds.begin(function, self._device)
        return True

    def _share(self, replays: int, set_calls: int) -> float:
        """The share of replays with new addresses.

        C++ leaves only such replays to Python, so the nodes set since the first sample tell the share. If some
        nodes are set at every replay, Python gets all replays, and the share is that of the due samples.
        """
        first, set_before = self._first
        by_nodes = (set_calls - set_before) / max(1, replays - first) / (self._set_nodes / self._samples)
        return min(by_nodes, self._samples / self._due)

    def _go_on(self, function: Any) -> bool:
        is_built = builds.go_on(function)
        if is_built is None:
            return True
        if not is_built:
            take_choice(function, self._sizes, Choice(Reason.NOT_COMPILED))
            return False
        # Functions that follow in the step are recorded again too, so functions wait for each other.
        _waiting.add(self)
        self._patience -= 1
        if self._patience and builds.is_any_under_way():
            return True
        with contextlib.suppress(KeyError):  # it is empty
            while True:
                _waiting.pop()._end()
        return False

    def _end(self) -> None:
        self._next = float("inf")
        if self.ready is not None:
            self.ready("its inputs are read from a table from now on")


_waiting: weakref.WeakSet[Sampler] = weakref.WeakSet()  # samplers whose functions can be recorded with a table


def sampler_for(function: Any, sizes: Hashable, device: int, log: Counted) -> Sampler | None:
    """The sampler of a recording without a table; None if no kernel could read one, or if the route is chosen."""
    if not readers_of(function) or builds.is_over(function) or not may_use_table(function, sizes):
        return None
    return Sampler(function, sizes, device, log)


def _count(function: Any, indices: Collection[int], names: KernelNames) -> tuple[int, int]:
    """The number of kernels that could read some of these inputs in a table, and of the inputs they could read."""
    readers = readers_of(function)
    readable = {index for reader in readers for _, index in reader.inputs}.intersection(indices)
    kernels = {reader.kernel for reader in readers}
    return sum(name in kernels for name in names(readable)), len(readable)
