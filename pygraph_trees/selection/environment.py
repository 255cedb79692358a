"""The questions that a trial asks of the functions it measures."""

from __future__ import annotations

from .decision import Execution, Handed


class Environment:
    """What a member asks of the function's surroundings; each method has a plain answer."""

    def ended(self, way: Execution) -> None:
        """Notes the way that is taken from now on."""

    def handed(self) -> Handed:
        """The extra work of graphed functions downstream if this one is un-graphed."""
        return Handed()

    def why_not_tried(self) -> str | None:
        """Why un-graphed calls would disturb other functions too much; None if they would not."""
        return None
