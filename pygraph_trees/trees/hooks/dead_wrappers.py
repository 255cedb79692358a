"""Replaces torch's search for dead functorch wrappers among the arguments of an autograd function.

Each forward of a compiled training step is such a function, and all its parameters are arguments. :func:`unwrapping`
takes upstream's function, which looks at them in Python, and returns one in C++ that calls it only if there is a
wrapper. Without the C++ parts, or if torch itself looks in C++, it returns upstream's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pygraph_trees.compat import unwraps_in_python
from pygraph_trees.native import binding
from pygraph_trees.reasons import Reason, Why


def unwrapping(upstream: Callable[..., Any]) -> Callable[..., Any]:
    if binding.extension is None or not unwraps_in_python():
        return upstream
    replacement: Callable[..., Any] = binding.extension.unwrapping(upstream)  # Dynamo sees no frame of it to compile
    return replacement


def counts() -> tuple[int, dict[Why, int]]:
    """How many calls had no wrapper, and how many had one."""
    if binding.extension is None:
        return 0, {}
    plain, wrapped, *_ = binding.extension.counted_host_work()
    return plain, {Reason.WRAPPED(): wrapped} if wrapped else {}
