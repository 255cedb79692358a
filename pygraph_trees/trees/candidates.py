"""Which of a function's steady recordings at one place in the tree takes a call.

Mostly it is the one that took the last call. Where that one does not, the others are found by the addresses of their
static and managed inputs: what many recordings cost is one look-up, and then only those are asked that differ in
which outputs have to be dead.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pygraph_trees.tensors import addresses_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from .recording import Recording


class Candidates:
    """The steady recordings of one function behind one recording, or at the begin of a step."""

    def __init__(self, first: Recording) -> None:
        self._latest = first
        self._count = 0
        # By the inputs whose addresses matter: what reads them, and the recordings by what it reads.
        self._groups: dict[
            tuple[int, ...], tuple[Callable[[Sequence[Any]], list[int]], dict[tuple[int, ...], list[Recording]]]
        ] = {}
        self.took(first)

    def took(self, recording: Recording) -> None:
        """It took a call, and is asked first from now on."""
        self._latest = recording
        indices, addresses = recording.checked_indices, recording.checked_addresses
        if indices not in self._groups:
            self._groups[indices] = addresses_of(indices), {}
        others = self._groups[indices][1].setdefault(addresses, [])
        if recording not in others:
            others.append(recording)
            self._count += 1

    def find(self, inputs: list[Any]) -> Recording | None:
        """The recording that takes these inputs (see :meth:`Recording.takes`)."""
        latest = self._latest
        if latest.takes(inputs):
            return latest
        if self._count == 1:
            return None
        for read, by_addresses in self._groups.values():
            for recording in by_addresses.get(tuple(read(inputs)), ()):
                if recording is not latest and recording.takes(inputs):
                    self._latest = recording
                    return recording
        return None
