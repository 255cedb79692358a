"""The recordings that a call of a function may replay on the fast path, in upstream's order.

:class:`Search` finds the :class:`Candidates` of a function after the last replayed recording, or at a root. It
remembers them until its memory is cleared, which happens whenever upstream's code runs instead of a fast replay.
:meth:`Candidates.first_accepting` returns the first recording that takes a call's inputs. None always means that
upstream must be called.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any, Protocol

from torch._inductor import cudagraph_trees

from pygraph_trees.native.tensors import candidate_filter, first_fit

from .liveness import release_unneeded
from .reclaiming import Reclaimed, Reclaiming
from .recording import Recording

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_EXECUTION = cudagraph_trees.ExecutionState.EXECUTION

# Places remembered for each function; after that many, all are forgotten and found again.
_MOST_PLACES = 1024
# Calls before a candidate_filter is made: making one takes longer than many calls without it.
_ASKED_BEFORE = 8


class Candidates:
    """The recordings of one function at one place: after one recording, or at the roots."""

    __slots__ = (
        "_asked",
        "_choices",
        "_find",
        "begins",
        "candidate_filter",
        "compile_id",
        "mode",
        "recordings",
        "replay",
        "replays",
    )

    def __init__(self, begins: bool | None, recordings: Sequence[Recording], mode: Any, compile_id: Any):
        self.begins = begins  # whether a new step must begin here; None if it may or may not
        self.recordings = recordings
        self.mode, self.compile_id = mode, compile_id
        # For the part in C++.
        self.replays = tuple(recording.native for recording in recordings)
        self.replay = self.replays[0] if len(recordings) == 1 else None
        self.candidate_filter: Callable[[int, list[Any]], int] | None = None
        self._choices = [(recording.whereabouts, recording.deaths_before) for recording in recordings]
        self._asked = 0

    def first_accepting(self, inputs: list[Any]) -> Recording | None:
        """The first recording that takes these inputs; its graph then holds their addresses."""
        if len(self.recordings) == 1:
            recording = self.recordings[0]
            return recording if recording.accepts(inputs) else None
        find = self.candidate_filter or self._finder()
        found = self._first_of_several(find, inputs)
        if found is None and release_unneeded(self.recordings[0].cuda_graphs_pool):  # outputs now dead may let one fit
            found = self._first_of_several(find, inputs)
        return found

    def _finder(self) -> Callable[[int, list[Any]], int]:
        self._asked += 1
        if self._asked == 1:
            self._find: Callable[[int, list[Any]], int] = first_fit(self._choices)
        if self._asked > _ASKED_BEFORE:
            self.candidate_filter = self._find = candidate_filter(self._choices)
        return self._find

    def _first_of_several(self, find: Callable[[int, list[Any]], int], inputs: list[Any]) -> Recording | None:
        position = find(0, inputs)
        while position < len(self.recordings):
            if self.recordings[position].accepts(inputs):
                return self.recordings[position]
            position = find(position + 1, inputs)
        return None


class Searched(Reclaimed, Protocol):
    """The manager whose recordings are searched."""

    warmed_up_functions: Any
    id_to_mode: Any
    id_to_compile_id: Any
    reclaiming: Reclaiming

    @property
    def clones_outputs(self) -> bool: ...

    def is_graphed(self, function_id: Any, node_id: Any) -> bool: ...


class Search:
    """The candidates of one manager's functions; each search is given the manager, which is not kept."""

    __slots__ = ("known",)

    def __init__(self) -> None:
        # By function, then by the recording that was replayed before, or None if no path is open. Candidates at the
        # roots that are valid after any recording when a step begins are also stored with the key True.
        self.known: dict[Any, dict[Any, Candidates]] = {}

    def find(self, manager: Searched, function_id: Any, begins: bool) -> Candidates | None:
        """Searches for a function's recordings in the places where upstream does, which may end the open path.

        None if upstream might do anything except replay a recording that has a fast path.
        """
        if function_id not in manager.warmed_up_functions:
            return None
        node = manager.current_node
        wanted: bool | None = None
        siblings = None
        if node is None:
            if manager.reclaiming.forgotten:
                manager.reclaiming.give_back(manager)
        else:
            if manager.path_state is not _EXECUTION or not manager.is_graphed(function_id, node.id):
                return None
            # If upstream clones live outputs, a new step never continues the last step's path.
            siblings = None if begins and manager.clones_outputs else node.children.get(function_id)
            if siblings:
                wanted = False if manager.clones_outputs else None
            else:
                manager.try_end_curr_execution()
                if manager.current_node is not None:
                    return None
                if manager.reclaiming.forgotten:
                    manager.reclaiming.give_back(manager)
                wanted = True
        if not siblings:
            siblings = manager.roots.get(function_id)
            if not siblings or not manager.is_graphed(function_id, None):
                return None
        # From the first recording without a fast path on, only upstream can check the inputs.
        fast = list(itertools.takewhile(lambda r: type(r) is Recording and r.has_fast_path, siblings))
        if not fast:
            return None
        places = self.known.setdefault(function_id, {})
        if len(places) >= _MOST_PLACES:
            places.clear()
        found = places.get(True) if wanted else None
        if found is None:
            found = Candidates(wanted, fast, manager.id_to_mode[function_id], manager.id_to_compile_id[function_id])
            if wanted:
                places[True] = found
        if begins or not wanted:  # otherwise the path ended because its outputs are dead, which each call checks
            places[node] = found
        return found
