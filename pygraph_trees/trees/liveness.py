"""Liveness checks of recorded outputs, which are in a graph pool.

:func:`register` adds a recording with outputs to those of its pool, and lets upstream's references notice outputs that
C++ holds. An output that only its recording holds may keep others alive through the graph of a backward that never ran;
:func:`release_unneeded` detaches all such outputs of a pool. :func:`deaths` prepares the check whether given outputs on
a path are dead.
"""

from __future__ import annotations

import functools
import itertools
import sys
import weakref
from typing import TYPE_CHECKING, Any, Protocol

import torch

from pygraph_trees import compat
from pygraph_trees.native.binding import packed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence


class HoldsOutputs(Protocol):
    """The attributes of a recording that concern its outputs."""

    cached_tensor_outputs: Any
    outputs_weakrefs: Any
    path_weakrefs: Any
    cuda_graphs_pool: Any

    @property
    def _path_from_root(self) -> Iterator[Any]: ...


class Deaths:
    """The check whether some outputs are all dead.

    A place has the list of its recording's cached outputs, the list of torch's weak references to all of its outputs,
    and the output's index in both.
    """

    def __init__(self, places: Sequence[tuple[list[Any], list[Any], int]], release: Callable[[], bool]) -> None:
        """``release``: drops unneeded references to such outputs, and returns whether there were any."""
        self.places, self._release = tuple(places), release
        # Runs of outputs of the same recording, the form in which C++ takes them.
        runs = [list(run) for _, run in itertools.groupby(self.places, key=lambda place: id(place[0]))]
        self.groups = tuple((run[0][0], packed([index for _, _, index in run])) for run in runs)

    def ask(self) -> bool:
        """Whether all are dead. C++ calls this if it sees a reference to one of them."""
        return self._are_dead() or (self._release() and self._are_dead())

    def _are_dead(self) -> bool:
        return all(references[index]() is None for _, references, index in self.places)


# The recordings that have outputs, by graph pool. One manager uses a pool, and one thread at a time calls it.
_by_pool: weakref.WeakValueDictionary[Any, weakref.WeakSet[HoldsOutputs]] = weakref.WeakValueDictionary()


def register(recording: HoldsOutputs) -> object:
    """Adds a recording to those of its pool, as long as it holds the returned object.

    Before torch 2.15, upstream's references to cached outputs regard an output as dead if only autograd holds it. From
    now on they regard it as alive.
    """
    held = _by_pool.setdefault(recording.cuda_graphs_pool, weakref.WeakSet())
    held.add(recording)
    if compat.sees_what_autograd_holds(recording):
        return held
    # Upstream would overwrite outputs that a backward reads later.
    reference = weakref.ref(recording)
    for number in range(len(recording.cached_tensor_outputs)):
        if recording.cached_tensor_outputs[number] is not None:
            output: Any = recording.outputs_weakrefs[number]
            output.extra_ref_check = functools.partial(_is_released, reference, number, output.extra_ref_check)
    return held


def release_unneeded(pool: Any) -> bool:
    """Detaches outputs that only their recordings hold from autograd's graphs, as torch 2.15 does; tells if any was.

    Such a graph may hold other outputs, of any recording: tensors saved for it, and tensors saved before.
    """
    found, recordings = False, list(_by_pool.get(pool, ()))
    for _ in range(1 + sum(len(recording.cached_tensor_outputs) for recording in recordings)):
        if not sum(map(_release_autograd, recordings)):
            break
        found = True
    return found


def deaths(recording: HoldsOutputs, indices: list[tuple[int, int]]) -> Deaths | None:
    """The check whether outputs on the path to a recording are dead, by depth and number; None without outputs."""
    path = list(recording._path_from_root) if indices else []
    places = [(path[d].cached_tensor_outputs, recording.path_weakrefs[d], number) for d, number in indices]
    return Deaths(places, functools.partial(release_unneeded, recording.cuda_graphs_pool)) if places else None


def _is_released(recording: Callable[[], Any], number: int, check: Callable[[], bool]) -> bool:
    """Whether only its recording holds a cached output: C++ does not, and upstream's ``check`` says so too."""
    node = recording()
    return (node is None or node.cached_tensor_outputs[number]._use_count() == 1) and check()


def _release_autograd(recording: HoldsOutputs) -> bool:
    outputs, found = recording.cached_tensor_outputs, False
    for i in range(len(outputs)):
        # The output must have no name here: only the references of the list and of the argument may count.
        if (
            outputs[i] is not None
            and outputs[i].grad_fn is not None
            and outputs[i]._use_count() == 1
            and sys.getrefcount(outputs[i]) == 2
            and not outputs[i]._is_view()
        ):
            with torch.inference_mode(False):  # inference mode does not detach
                outputs[i].detach_()
            found = True
    return found
