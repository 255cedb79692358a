"""The recordings that a call of a function may replay on the fast path, in upstream's order.

:class:`Search` finds the :class:`Candidates` of a function after the recording that was replayed last, or at a root,
and remembers them until its memory is cleared: whenever upstream is asked for anything but a fast replay.
:meth:`Candidates.first_accepting` gives the first recording that takes a call's inputs. None always means that upstream
has to be called.
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

# Places remembered of a function; in a program that has more they are found again.
_MOST_PLACES = 1024
# Calls until a candidate_filter tells recordings apart: to make one takes longer than many calls without it.
_ASKED_BEFORE = 8


class Candidates:
    """The recordings of one function at one place: after one recording, or where no path is open."""

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
        self.begins = begins  # whether a new step must begin here, or must not; None if either will do
        self.recordings = recordings
        self.mode, self.compile_id = mode, compile_id
        # For the part in C++: of the only recording, or of several, with a candidate_filter once there is one.
        self.replays = tuple(recording.native for recording in recordings)
        self.replay = self.replays[0] if len(recordings) == 1 else None
        self.candidate_filter: Callable[[int, list[Any]], int] | None = None
        self._choices = [(recording.whereabouts, recording.deaths_before) for recording in recordings]
        self._asked = 0

    def first_accepting(self, inputs: list[Any]) -> Recording | None:
        if len(self.recordings) == 1:
            recording = self.recordings[0]
            return recording if recording.accepts(inputs) else None
        find = self.candidate_filter or self._finder()
        found = self._first_of_several(find, inputs)
        if found is None and release_unneeded(self.recordings[0].cuda_graphs_pool):  # what was held, and ruled some out
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
    """The candidates of one manager's functions; the manager is given to each search and not kept."""

    __slots__ = ("known",)

    def __init__(self) -> None:
        # By function, and by the recording that was replayed before, None if no path is open. Candidates at the roots
        # that are good after any recording, if a step begins, are also there by True.
        self.known: dict[Any, dict[Any, Candidates]] = {}

    def find(self, manager: Searched, function_id: Any, begins: bool) -> Candidates | None:
        """Looks where upstream looks for a function's recordings, which may end the open path.

        None if upstream may do anything but replay a recording that has a fast path.
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
            # If what is alive is cloned, a new step never continues where the last one ended.
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
        # After one that only upstream can ask, upstream asks all.
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
        if begins or not wanted:  # a path also ends if all of it is dead, which is asked each time
            places[node] = found
        return found
