"""The recordings that a call of a function may replay on the fast path, in upstream's order.

:func:`find` gives C++ the candidates of a function after the last replayed recording, or at a root, which are tried in
turn. The manager remembers them until upstream's code runs instead. None means that upstream must be called.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from torch._inductor import cudagraph_trees

from pygraph_trees.native import binding

from ..pools.liveness import release_unneeded
from ..recordings.recording import Recording

_EXECUTION = cudagraph_trees.ExecutionState.EXECUTION

# Places remembered for each function; after that many, all are forgotten and found again.
_MOST_PLACES = 1024


def candidate_filter(facts: Sequence[tuple[Sequence[tuple[int, int]], Any]]) -> Any:
    """Returns a filter that rules out most of several recordings for the inputs of a call.

    ``facts``: for each recording, the index and address of each static input, and its ``deaths_before``.
    """
    count, size = len(facts), (len(facts) + 63) // 64 * 8
    held: dict[tuple[int, int], tuple[list[Any], int]] = {}  # by list and index: bits of the recordings ruled out
    places: defaultdict[int, defaultdict[int, int]] = defaultdict(lambda: defaultdict(int))  # by index, address: bits
    for number, (fixed, deaths) in enumerate(facts):
        for index, address in fixed:
            places[index][address] |= 1 << number
        for cached, _, index, _ in () if deaths is None else deaths.places:
            _, before = held.get((id(cached), index), (cached, 0))
            held[id(cached), index] = cached, before | 1 << number

    def row(those: int) -> bytes:
        return those.to_bytes(size, "little")

    # An input that all recordings need at the same address distinguishes none of them.
    inputs = [
        (index, row(functools.reduce(operator.or_, by.values())), {at: row(those) for at, those in by.items()})
        for index, by in places.items()
        if set(by.values()) != {(1 << count) - 1}
    ]
    outputs = [(cached, index, row(those)) for (_, index), (cached, those) in held.items()]
    return binding.extension.CandidateFilter(count=count, held=outputs, places=inputs)


def find(manager: Any, function_id: Any, begins: bool) -> Any:
    """Searches for a function's recordings in the places where upstream does, which may end the open path.

    None if upstream might do anything except replay a recording that has a fast path, or after an error.
    """
    try:
        return _find(manager, function_id, begins)
    except Exception as error:
        manager.failed(error)
        return None


def _find(manager: Any, function_id: Any, begins: bool) -> Any:
    starts_over = manager.why_start_over is not None or manager.doubt is not None
    if starts_over or manager.output_policy.changing or function_id not in manager.warmed_up_functions:
        return None
    node = manager.current_node
    wanted: bool | None = None  # whether a new step must begin here; None if it may or may not
    siblings = None
    if node is not None:
        if manager.path_state is not _EXECUTION:
            return None
        if not (begins and manager.ends_steps):  # then the path ends first
            if not manager.is_graphed(function_id, node.id):
                return None
            siblings = node.children.get(function_id)
        if siblings:
            wanted = False if manager.ends_steps else None
        else:
            manager.try_end_curr_execution()
            if manager.current_node is not None or manager.output_policy.changing:
                return None
            wanted = True
    if not siblings:
        manager.give_back()
        siblings = manager.roots.get(function_id)
        if not siblings or not manager.is_graphed(function_id, None):
            return None
    # From the first recording without a fast path on, only upstream can check the inputs.
    fast = list(itertools.takewhile(lambda r: type(r) is Recording and r.native is not None, siblings))
    if not fast:
        return None
    places = manager._candidates.setdefault(function_id, {})
    if len(places) >= _MOST_PLACES:
        places.clear()
    found = places.get(True) if wanted else None
    if found is None:
        facts = [(recording.fixed, recording.deaths_before) for recording in fast]
        found = binding.extension.Candidates(
            begins=wanted,
            mode=manager.id_to_mode[function_id],
            compile_id=manager.id_to_compile_id[function_id],
            replays=tuple(recording.native for recording in fast),
            make_filter=functools.partial(candidate_filter, facts),
            release=functools.partial(release_unneeded, fast[0].cuda_graphs_pool),
        )
        if wanted:
            places[True] = found
    if begins or not wanted:  # otherwise the path ended because its outputs are dead, which each call checks
        places[node] = found
    return found
