"""Choices that a seed determines.

Each program has its own :class:`Draws`, so it depends on the seed and its number alone, not on the programs before it.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


class Draws(random.Random):
    """Random choices of one program."""

    def several(self, choices: Sequence[T], most: int, least: int = 1) -> list[T]:
        """Different choices in a random order, at most as many as there are."""
        return self.sample(choices, min(len(choices), self.randint(least, most)))

    def chance(self, one_in: int) -> bool:
        return self.randrange(one_in) == 0
