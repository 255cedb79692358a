"""Whether this process can give graphs addresses: :func:`usable_driver`, asked where a function would be recorded.

Where it cannot, :func:`why_unusable` says why.
"""

from __future__ import annotations

import functools
import warnings

from pygraph_trees.cuda.driver import Driver, driver
from pygraph_trees.errors import PygraphWarning


class IndirectionOff(PygraphWarning):
    template = "pygraph_trees: inputs of CUDA graphs are copied at each replay, as upstream does: {why}"


@functools.cache
def usable_driver() -> Driver | None:
    """The driver, None where it lacks what indirection needs; then one warning says what."""
    why = why_unusable()
    if why is not None:
        warnings.warn(IndirectionOff(why=why), stacklevel=2)
        return None
    return driver()


def why_unusable() -> str | None:
    """What is missing; None where nothing is."""
    found = driver()
    if found is None:
        return "cuda.bindings is not installed"
    missing = found.missing_calls()
    return f"the driver or its bindings are too old, they lack {', '.join(missing)}" if missing else None
