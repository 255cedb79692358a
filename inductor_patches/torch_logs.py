"""``TORCH_LOGS="pygraph"`` and ``"+pygraph"``: the facts of the report as they happen.

Torch reads ``TORCH_LOGS`` once, during its import, and raises on an unknown name. :func:`register` runs earlier if
``pygraph_trees`` is imported before torch or, since torch 2.12, through the installed package's entry point.
``TORCH_LOGS="+pygraph_trees"`` always works.
"""

from __future__ import annotations

_NAME = "pygraph"


def register() -> None:
    """Registers the log ``pygraph`` with torch; it is the logger ``pygraph_trees``."""
    from torch._logging import _internal

    if not _internal.log_registry.is_log(_NAME):
        _internal.register_log(_NAME, "pygraph_trees")
