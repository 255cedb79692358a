"""Checks in advance that torch has the attributes that the C++ part looks up by name.

A missing attribute would raise ``AttributeError`` in a user's call. If :func:`check` finds that one is missing, the C++
part is not used, and the log names the attribute.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch._dynamo.mutation_guard import GenerationTracker
from torch._inductor import cudagraph_trees, debug
from torch._inductor.output_code import CompiledFxGraph
from torch.autograd import profiler

from pygraph_trees.native import binding

# State of a manager that C++ reads and writes, and that upstream's constructor sets.
_STATE = ("graph", "path_state", "current_gen", "running_forwards_with_pending_backwards")
_OPTIONAL = {"manager.has_live_user_visible_output_cloning"}  # needed only if a manager may clone outputs
_OWNERS: Mapping[str, Any] = {
    "compiled": CompiledFxGraph,
    "debug": debug,
    "generations": GenerationTracker,
    "graph": torch.cuda.CUDAGraph,
    "manager": cudagraph_trees.CUDAGraphTreeManager,
    "profiler": profiler,
    "steps": cudagraph_trees.MarkStepBox,
}


def missing() -> list[str]:
    """The names that their owners lack, each with its owner's name in C++."""
    names = (name for name in binding.extension.NAMES if name not in _OPTIONAL)
    found = [name for name in names if not _has(_OWNERS[name.partition(".")[0]], name.partition(".")[2])]
    known = _OWNERS["manager"].__init__.__code__.co_names
    return found + [f"manager.{name}" for name in _STATE if name not in known]


def check() -> None:
    """Turns the part in C++ off if a name is missing."""
    found = missing() if binding.extension is not None else []
    if found:
        binding.do_without_extension(f"it needs attributes that are missing: {', '.join(found)}")


def _has(owner: Any, name: str) -> bool:
    bases = getattr(owner, "__mro__", ())  # a module has none
    return hasattr(owner, name) or any(name in getattr(base, "__annotations__", ()) for base in bases)
