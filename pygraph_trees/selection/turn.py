"""One trial at a time: the turn to measure, which the trials of a process pass on.

Un-graphed calls of one function change the measurements of others. A trial asks for the turn at each of its steps, and
keeps it until it is over. If its functions are no longer called, the turn goes to another trial. There is no lock,
since a finalizer might wait for it: if two threads take the turn at once, one loses it at its next step.
"""

from __future__ import annotations

import weakref
from typing import Protocol

_MOST_REFUSED = 200  # requests of one other trial after the holder's last one


class Taker(Protocol):
    @property
    def is_over(self) -> bool: ...


class Turn:
    def __init__(self) -> None:
        self._holder: weakref.ref[Taker] | None = None
        self._refused: dict[int, int] = {}  # requests by trial, since the holder's last one

    def take(self, trial: Taker) -> bool:
        """Gives the turn to a trial, or lets it keep the turn; returns whether the trial has it."""
        holder = None if self._holder is None else self._holder()
        if holder is not None and holder is not trial and not holder.is_over:
            refused = self._refused[id(trial)] = self._refused.get(id(trial), 0) + 1
            if refused <= _MOST_REFUSED:
                return False
        self._refused.clear()
        if holder is not trial:
            self._holder = weakref.ref(trial)
        return True


TURN = Turn()  # of this process
