"""Gives back recordings that a manager no longer needs, and the graph pool once it is empty.

The recordings of functions that are no longer graphed or must be recorded again, and all that follow them, are freed as
soon as no path is open; the pool, once no output in it may be alive. Nothing happens during capture or after shutdown.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch._inductor import cudagraph_trees

from pygraph_trees.indirection.retired import release_retired
from pygraph_trees.reasons import Reason, Why

from ..functions.lanes import LanesMemory
from ..pools import pools
from ..pools.collector import paused

if TYPE_CHECKING:
    from ..functions.function import FunctionModel

_log = logging.getLogger("pygraph_trees.trees")

_STATE = cudagraph_trees.ExecutionState

# Graphs that keep their pools, with references to the outputs that were alive there.
_in_use: list[tuple[Any, list[Any]]] = []


class Reclaiming:
    """The functions whose recordings one manager must give back, and outputs that may outlive their recordings.

    Methods are given the manager and do not keep it: it must be freed with its functions.
    """

    def __init__(self, remake: Callable[[], Any], candidates: dict[Any, Any]) -> None:
        """``remake`` makes another manager of the same kind, with a new pool."""
        self._remake = remake
        self._candidates = candidates  # of the manager; cleared whenever recordings may be given back
        # By id of a function whose recordings are to be given back: the number of the newest of these.
        self.forgotten: dict[Any, float] = {}
        self._again: dict[Any, Why] = {}  # why, by id of a function that is to be recorded again
        self._dropped: dict[Any, Why] = {}  # why, by id of a function whose recordings the pool has no room for
        self._seen = 0  # bytes of the pool when recordings were dropped last; 0 if it is a new pool
        self.lanes = LanesMemory()
        self.is_alike = False  # in all ranks
        self._left: list[Any] | None = None  # references to outputs of recordings given back; None if none was
        self._is_unknown = False  # whether an output that is not among them may be alive

    def forget(self, manager: Any, model: FunctionModel, *, later: bool) -> None:
        """Gives back a function's recordings, and those that follow, once no path is open, or at a later call."""
        ids = [id_ for id_, function in list(manager.ids_to_funcs.items()) if function.model is model]
        self.forgotten |= dict.fromkeys(ids, math.inf)
        for noted in (self._again, self._dropped):
            for function_id in ids:
                noted.pop(function_id, None)
        self._candidates.clear()
        if later or manager.graph is None:
            return
        if manager.path_state is _STATE.EXECUTION:
            manager.try_end_curr_execution()
        self.give_back(manager)

    def record_again(self, function_id: Any, why: Why, newest: int) -> None:
        """Lets a function be recorded again, also during a call; recordings up to number ``newest`` are given back."""
        self._again[function_id] = why
        before = self.forgotten.get(function_id, math.inf)
        self.forgotten[function_id] = newest if before == math.inf else max(newest, before)
        self._candidates.clear()

    def awaits(self, function_id: Any) -> bool:
        """Whether a function is to be recorded again."""
        return function_id in self._again

    def why_again(self, function_id: Any) -> Why | None:
        """Why a function is recorded again, returned once; None if it is not, or if the open path must end before."""
        again = None if function_id in self.forgotten else self._again.pop(function_id, None)
        return again or self._dropped.pop(function_id, None)

    def decide_alike(self) -> None:
        """Once a function may call a collective: no recording is made or dropped for what may differ between ranks.

        The graphs with a collective must be of one capture in all ranks. NCCL registers buffers during a capture, and
        waits for the others to do so. A recording takes those that follow it with it.
        """
        self.is_alike, self.lanes.why_full = True, Reason.RANKS_BESIDE()
        for function_id, why in list(self._again.items()):
            if why.reason in (Reason.ON_LANES, Reason.TABLE_BUILT):
                self._again.pop(function_id)
                self.forgotten.pop(function_id, None)

    def limit(self, manager: Any, nbytes: int, limit: int) -> bool:
        """Drops all recordings, as soon as no path is open, if ``nbytes`` is more than ``limit``; tells if so.

        ``nbytes``: of the graph pool and of own memory that is kept. Outputs that are alive keep theirs, so the pool
        may not shrink; nothing more is dropped until ``nbytes`` grows.
        """
        if nbytes <= max(limit, self._seen):
            return False
        self._seen = nbytes
        why = Reason.POOL_LIMIT(nbytes=nbytes)
        _log.info("all recordings are dropped: %s", why)
        ids = list(manager.ids_to_funcs)
        self.forgotten = dict.fromkeys(ids, math.inf) | self.forgotten
        self._dropped = dict.fromkeys(ids, why)
        self._candidates.clear()
        return True

    def give_back(self, manager: Any) -> None:
        """Gives back the recordings of forgotten functions, unless a path is open."""
        if manager.current_node is not None or manager.roots is None or torch.cuda.is_current_stream_capturing():
            return
        release_pools()
        forgotten, self.forgotten = self.forgotten, {}
        self._candidates.clear()  # some may have been found since ``forget``
        gone: list[Any] = []
        todo = [manager.roots]
        while todo:
            below = todo.pop()
            for function_id, newest in forgotten.items():
                found = below.pop(function_id, ())
                gone += [node for node in found if node.id.id <= newest]
                if kept := [node for node in found if node.id.id > newest]:
                    below[function_id] = kept
            todo += [node.children for nodes in below.values() for node in nodes]
        if gone:
            self._left = self._left or []
        while gone:
            node = gone.pop()
            gone += itertools.chain.from_iterable(node.children.values())
            node.remove_node_cached_tensors()  # the program may still hold one
            assert self._left is not None
            self._left += _outputs_of(node)
            self._is_unknown |= _makes_new_outputs(node)
            node.graph = node.native = None
            if (log := getattr(node, "log", None)) is not None:
                log.is_tried = False
            del node
        with paused():  # a finalizer could wait for the lock
            release_retired()
        self.give_pool_back(manager)

    def give_pool_back(self, manager: Any) -> bool:
        """Gives back the graph pool if recordings were given back and it is empty; returns whether it did.

        The pool is not empty while an output is or may be alive. If each replay makes new output tensors, only the
        newest ones are known.
        """
        if manager.graph is None or torch.cuda.is_current_stream_capturing():  # it was shut down
            return False
        if self.forgotten:  # the open path ends if the program holds no output of it
            node = manager.current_node
            if manager.path_state is _STATE.EXECUTION:
                manager.try_end_curr_execution()
            elif manager.path_state is _STATE.RECORDING and node is not None and node.all_outputs_are_dead():
                manager.clear_current_path_state_and_set_to_none()
            if manager.current_node is None:
                self.give_back(manager)  # calls this method again
            return False
        if self._left is None:
            return False
        self._left = [held for held in self._left if not held.expired()]
        is_used = self._again or manager.current_node is not None or any(manager.roots.values())
        return not (self._left or self._is_unknown or is_used) and self._leave_pool(manager)

    def start_over(self, manager: Any, why: Why) -> None:
        """Drops all recordings and leaves the graph pool, in which unknown memory may be in use.

        Outputs that are alive are moved if that is possible, and the pool stays as long as one is alive. The report has
        ``why`` as the reason of the next recordings.
        """
        if manager.graph is None or torch.cuda.is_current_stream_capturing():
            return
        manager.move_last_outputs()
        pool, node = manager.cuda_graphs_thread_pool, manager.current_node
        self._left = [*(self._left or []), *_outputs_on_path(node)]
        recorded = [held for made in recordings_in(manager.roots) for held in _outputs_of(made)]
        if node is not None:
            manager.current_node, manager.path_state = None, _STATE.NONE
        self.forgotten = dict.fromkeys(manager.ids_to_funcs, math.inf)
        self._again, self._dropped = {}, dict.fromkeys(self.forgotten, why)
        try:
            self.give_back(manager)
        except Exception as error:  # the pool is left in any case
            _log.info("recordings could not be given back: %s", error)
            self._left = [*(self._left or []), *recorded]
        recorded.clear()  # upstream's references may hold their recordings, and these the old graph
        if manager.cuda_graphs_thread_pool == pool:
            # This frame must not keep the old graph alive. Outputs of earlier steps need nothing here: they were moved
            # when their step ended, or are torch's and have been invalid since.
            held = [(manager.graph, _storages_of(self._left or ()))]
            if self._leave_pool(manager):
                _in_use.extend(held)
            held.clear()
            release_pools()
            torch.cuda.empty_cache()

    def keep_pool(self, manager: Any) -> None:
        """Keeps the graph pool of a manager that ends until its last step's outputs are dead."""
        release_pools()
        _in_use.append((manager.graph, _storages_of(_outputs_on_path(manager.current_node))))

    def _leave_pool(self, manager: Any) -> bool:
        """Gives the manager a new pool; returns whether there is one."""
        release_pools()
        # Torch keeps a pool as long as a graph uses it, even the empty graph that its manager begins with.
        try:
            fresh = self._remake()
        except RuntimeError as error:  # no memory is free, or another thread captures
            _log.warning("a graph pool could not be given back: %s", error)
            return False
        old = manager.cuda_graphs_thread_pool
        for name in ("graph", "stream", "cuda_graphs_thread_pool"):
            setattr(manager, name, getattr(fresh, name))
        pools.OWNED.pop(old, None)
        pools.OWNED[manager.cuda_graphs_thread_pool] = manager
        self._left, self._seen, self._is_unknown = None, 0, False
        self.lanes.leave_pool(manager.ids_to_funcs)
        torch.cuda.empty_cache()
        return True

    def clear(self) -> None:
        self.forgotten, self._left = {}, None


def _outputs_of(node: Any) -> list[Any]:
    """References to all outputs of a recording that may be alive, if they are known."""
    return [held for held in (*getattr(node, "older_outputs", ()), *node.outputs_weakrefs) if held is not None]


def recordings_in(children: Mapping[Any, Sequence[Any]]) -> Iterator[Any]:
    todo = [children]
    while todo:
        for node in itertools.chain.from_iterable(todo.pop().values()):
            yield node
            todo.append(node.children)


def _outputs_on_path(node: Any) -> list[Any]:
    """References to the outputs of the recordings on the path to a node, if there is one."""
    path = () if node is None else node._path_from_root
    return [held for recording in path for held in recording.outputs_weakrefs if held is not None]


def _storages_of(outputs: Iterable[Any]) -> list[Any]:
    """Plain references: upstream's own may raise, and once its recording is gone, call an output alive forever."""
    return [output.ref for output in outputs if output.ref is not None]


def release_pools() -> None:
    """Releases pools that were kept for outputs that are dead by now."""
    for kept in list(_in_use):  # meanwhile, a finalizer or another thread may do the same
        if all(output.expired() for output in kept[1]):
            with contextlib.suppress(ValueError):
                _in_use.remove(kept)


def _makes_new_outputs(node: Any) -> bool:
    """Whether an output that is neither cached nor static was a new tensor at each replay."""
    log = getattr(node, "log", None)
    if log is not None and not log.replays:
        return False
    own = zip(node.outputs_weakrefs, node.unaliased_in_all_paths, strict=True)
    return any(held is not None and not is_cached for held, is_cached in own)
