"""The questions that a trial asks of the functions it measures."""

from __future__ import annotations

from .decision import Execution, Handed


class Environment:
    """What a member asks of the function's surroundings; each method has a plain answer."""

    def ended(self, way: Execution) -> None:
        """Notes the way that is taken from now on."""

    def restarted(self) -> None:
        """Notes that the trial starts again and needs the function's calls again."""

    def handed(self) -> Handed:
        """The extra work of graphed functions downstream if this one is un-graphed."""
        return Handed()

    def has_room(self) -> bool:
        """Whether memory suffices to record it again while it runs un-graphed."""
        return True

    def why_not_tried(self) -> str | None:
        """Why un-graphed calls would disturb other functions too much; None if they would not."""
        return None
