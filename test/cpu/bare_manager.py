"""A manager of graph trees as it is before its first call, without upstream's constructor, which needs a GPU."""

from __future__ import annotations

import collections
import threading
from typing import Any

from torch._inductor.cudagraph_trees import CompilationMode, ExecutionState

from pygraph_trees.compat import has_skip_table
from pygraph_trees.outputs.policy import OutputPolicy
from pygraph_trees.trees.managers.candidates import Search
from pygraph_trees.trees.managers.input_rules import Moves
from pygraph_trees.trees.managers.manager import Manager
from pygraph_trees.trees.managers.reclaiming import Reclaiming

# The attribute in which upstream notes functions that it does not graph; renamed in torch 2.15.
SKIPPED = "skip_cudagraph" if has_skip_table() else "non_cudagraph_managed_mutation_hint"


def bare_manager(kind: type[Manager] = Manager, **state: Any) -> Manager:
    """``state``: attributes that differ from the defaults; functions are for inference by default."""
    manager = kind.__new__(kind)
    search = Search()
    known = {
        "graph": object(),
        "stream": 0,
        "cuda_graphs_thread_pool": (0, 7),
        "device_index": 0,
        "roots": {},
        "current_node": None,
        "current_gen": -1,
        "path_state": ExecutionState.NONE,
        "running_forwards_with_pending_backwards": False,
        "has_live_user_visible_output_cloning": False,
        "ids_to_funcs": {},
        "id_to_mode": collections.defaultdict(lambda: CompilationMode.INFERENCE),
        "id_to_compile_id": collections.defaultdict(lambda: "3/1"),
        "warmed_up_functions": set(),
        "num_rerecord": collections.defaultdict(lambda: collections.defaultdict(int)),
        SKIPPED: collections.defaultdict(dict),
        "_candidates": search.known,
        "_find": search.find,
        "output_policy": OutputPolicy(search.known),
        "_moves": Moves(),
        "thread": threading.get_ident(),
        "reclaiming": Reclaiming(lambda: kind(0), search.known),
    }
    for name, value in (known | state).items():
        setattr(manager, name, value)
    return manager
