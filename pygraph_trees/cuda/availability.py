"""Whether this process can give addresses to graphs.

:func:`usable_driver` is asked when a function is recorded. It returns the driver, or None if ``cuda.bindings`` is not
installed or a call is missing; one warning per process then gives the reason, which :func:`why_unusable` returns.
"""

from __future__ import annotations

import functools
import warnings

from pygraph_trees.errors import PygraphWarning

from .driver import Driver, driver


class IndirectionOff(PygraphWarning):
    template = "pygraph_trees: inputs of CUDA graphs are copied at each replay, as upstream does: {why}"


@functools.cache
def usable_driver() -> Driver | None:
    """The driver; None, after one warning, if it lacks a call that indirection needs."""
    why = why_unusable()
    if why is not None:
        warnings.warn(IndirectionOff(why=why), stacklevel=2)
        return None
    return driver()


def why_unusable() -> str | None:
    """Names what is missing, or returns None."""
    found = driver()
    if found is None:
        return "cuda.bindings is not installed: pip install cuda-bindings"
    missing = found.missing_calls()
    return f"the driver or its bindings are too old, they lack {', '.join(missing)}" if missing else None
