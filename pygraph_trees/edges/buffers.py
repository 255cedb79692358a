"""Buffers of generated code that are not used again, so that operations that share none are independent.

Inductor would put results into buffers of other operations, which keeps these in order. Torch's allocator uses the
memory again instead, for each lane.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch._inductor import config
from torch._inductor.virtualized import V

from pygraph_trees.settings import Settings


def kept_apart(upstream: Callable[[Any, Any], bool]) -> Callable[[Any, Any], bool]:
    """``MemoryPlanningState.__contains__``: no buffer of a GPU can be used again, if lanes may be."""

    @functools.wraps(upstream)
    def contains(state: Any, key: Any) -> bool:
        return upstream(state, key) and not (key[0].type == "cuda" and _are_lanes_possible())

    return contains


def _are_lanes_possible() -> bool:
    is_graphed = config.triton.cudagraphs and not V.graph.cpp_wrapper
    return is_graphed and Settings.current().branches in ("auto", "always")
