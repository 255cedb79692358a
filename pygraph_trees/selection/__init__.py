"""Which functions are graphed.

:func:`why_not_graphed` is asked once for each compiled graph, before any of it is graphed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pygraph_trees.settings import Settings


def why_not_graphed(settings: Settings) -> str | None:
    """The reason why the settings keep a graph un-graphed, None where they do not."""
    return "pygraph_selective is 'never'" if settings.selective == "never" else None
