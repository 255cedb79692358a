"""Data flow: which operations of a capture an operation follows because of its tensors, and what lanes would gain.

Memory that is used again counts as other memory: tensors are told apart by their storages, and not by addresses.
"""

from __future__ import annotations

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from pygraph_trees.reasons import Reason, Why

from .lanes import BYTES_PER_US, LANES, Choice, time_us

Given = list[tuple[torch.Tensor, bool]]  # tensors, and whether they are written

_LEAST_GAIN, _LEAST_GAIN_US = 0.08, 10.0
_LEAST_OF_MORE = 0.05  # of the time on fewer lanes


class DataFlow:
    """The operations that have written to storages, and those that have read them since, by number."""

    def __init__(self) -> None:
        self.count = 0
        self._writer: dict[int, int] = {}  # by storage
        self._readers: dict[int, list[int]] = {}
        self._seen: dict[int, StorageWeakRef] = {}  # as long as one is held, no other storage takes its place

    def ahead(self, given: Given) -> set[int]:
        """The operations that an operation with these tensors must follow."""
        found: set[int] = set()
        for tensor, write in given:
            if (storage := storage_of(tensor)) is not None:
                found.update([self._writer[storage._cdata]] if storage._cdata in self._writer else ())
                found.update(self._readers.get(storage._cdata, ()) if write else ())
        return found

    def note(self, given: Given) -> None:
        """Adds the next operation."""
        for tensor, write in given:
            if (storage := storage_of(tensor)) is None:
                continue
            self._seen.setdefault(storage._cdata, StorageWeakRef(storage))
            if write:
                self._writer[storage._cdata], self._readers[storage._cdata] = self.count, []
            else:
                self._readers.setdefault(storage._cdata, []).append(self.count)
        self.count += 1


class Forecast:
    """The predicted times of a capture's operations on one stream, by number of lanes."""

    def __init__(self) -> None:
        self._flow, self._choices = DataFlow(), {lanes: Choice(lanes) for lanes in (1, *LANES)}
        self._barrier: set[int] = set()  # the last one
        self._nbytes = 0

    def captured(self, given: Given, nbytes: int, *, may_move: bool) -> None:
        """Notes an operation with its results; one that may not move is a barrier."""
        before = range(min(self._barrier, default=0), self._flow.count)  # all of it follows what came earlier
        ahead = self._flow.ahead(given) | self._barrier if may_move else {*before}
        self._barrier = self._barrier if may_move else {self._flow.count}
        self._flow.note(given)
        self._nbytes += nbytes
        for choice in self._choices.values():
            choice.put(choice.best(ahead) if may_move else 0, ahead, time_us(nbytes))

    def us(self, lanes: int) -> float:
        """Operations side by side share the memory's bandwidth."""
        return max(self._choices[lanes].end, self._nbytes / BYTES_PER_US)

    def choose(self) -> tuple[int, Why]:
        """The number of lanes that are worth a trial, 0 if there is none, and the reason."""
        few, more = LANES
        lanes = more if self.us(more) <= (1 - _LEAST_OF_MORE) * self.us(few) else few
        chain_us, us = self.us(1), self.us(lanes)
        if chain_us - us > max(_LEAST_GAIN * chain_us, _LEAST_GAIN_US):
            return lanes, Reason.ON_LANES(lanes=lanes)
        return 0, Reason.LITTLE_GAIN(us=round(us), chain_us=round(chain_us))


def storage_of(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    """A tensor's storage; None if there is none."""
    try:
        return tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):  # a sparse tensor
        return None
