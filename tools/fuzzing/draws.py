"""Choices that a seed determines.

Each program has its own :class:`Draws`, so it depends on the seed and its number alone, not on the programs before it.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


class Draws:
    """Random choices of one program."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def one_of(self, choices: Sequence[T]) -> T:
        return self._random.choice(choices)

    def several(self, choices: Sequence[T], most: int, least: int = 1) -> list[T]:
        """Different choices in a random order, at most as many as there are."""
        return self._random.sample(choices, min(len(choices), self.between(least, most)))

    def between(self, least: int, most: int) -> int:
        """A number from ``least`` to ``most``, both included."""
        return self._random.randint(least, most)

    def chance(self, one_in: int) -> bool:
        return self._random.randrange(one_in) == 0
