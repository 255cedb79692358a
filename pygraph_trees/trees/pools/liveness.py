"""Liveness checks of recorded outputs, which are in a graph pool.

:func:`register` lets upstream's references notice outputs that C++ holds. An output that only its recording holds may
keep others alive through the graph of a backward that never ran; :func:`release_unneeded` detaches all such outputs of
a pool. :func:`deaths` prepares the check of whether given outputs on a path are dead.
"""

from __future__ import annotations

import functools
import itertools
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._inductor.cudagraph_trees import StorageWeakRefWrapper
from torch.multiprocessing.reductions import StorageWeakRef


class CountsUpstreams(type):
    """Metaclass of a class that replaces one of upstream's, ``UPSTREAM``, while the patches are on.

    Upstream's ``isinstance`` checks then name the replacement, but must also accept instances of the original.
    """

    def __instancecheck__(cls, instance: object) -> bool:
        return type.__instancecheck__(vars(cls).get("UPSTREAM", cls), instance)


class OutputReference(StorageWeakRefWrapper, metaclass=CountsUpstreams):
    """Upstream's weak reference to an output's storage; an interrupt during a swap does not free it twice."""

    UPSTREAM = StorageWeakRefWrapper

    def swap_weakref(self, cdata: Any) -> None:
        self.ref = StorageWeakRef.from_weakref(cdata)


class OlderOutputs(list[Any]):
    """References to outputs that newer outputs of the same recording have replaced; some may have expired."""

    _most = 0  # once there are more references than this, expired ones are removed

    def add(self, references: Sequence[Any]) -> None:
        """The program may hold the outputs of all calls, so expired references are looked for only now and then."""
        self.extend(held for held in references if held is not None)
        if len(self) > self._most:
            self[:] = [held for held in self if not held.expired()]
            self._most = 2 * len(self)


class Deaths:
    """The check of whether all of some outputs are dead.

    A place has the list of its recording's cached outputs, the list of torch's weak references to all of its outputs,
    the output's index in both, and the address of the storage that it was made with.
    """

    def __init__(self, places: Sequence[tuple[list[Any], list[Any], int, int]], release: Callable[[], bool]) -> None:
        """``release``: drops unneeded references to such outputs, and returns whether there were any."""
        self.places, self._release = tuple(places), release

    @property
    def groups(self) -> list[tuple[list[Any], list[list[int]]]]:
        """Runs of outputs of the same recording, the form in which C++ takes them; made when needed, as it is large."""
        runs = [list(run) for _, run in itertools.groupby(self.places, key=lambda place: id(place[0]))]
        return [(run[0][0], [place for _, _, *place in run]) for run in runs]

    def ask(self) -> bool:
        """Whether all are dead. C++ calls this if it sees a reference to one of them."""
        return self.are_dead() or (self._release() and self.are_dead())

    def are_dead(self) -> bool:
        """Whether all are dead, without releasing any."""
        return all(references[index]() is None for _, references, index, _ in self.places)


# The recordings that have outputs, the newest last, by graph pool. One manager uses a pool, and one thread at a time
# calls it.
_by_pool: weakref.WeakValueDictionary[Any, weakref.WeakKeyDictionary[Any, None]] = weakref.WeakValueDictionary()


def register(recording: Any) -> object:
    """Adds a recording to those of its pool, as long as it holds the returned object.

    Upstream's references to cached outputs regard an output as dead if only its storage is held and, before torch 2.15,
    if only autograd holds it. From now on they regard it as alive. One that the program gave other memory is dead. An
    output with weak references is freed once found dead; otherwise they could revive it.
    """
    held = _by_pool.setdefault(recording.cuda_graphs_pool, weakref.WeakKeyDictionary())
    held.setdefault(recording)
    reference = weakref.ref(recording)
    for number in range(len(recording.cached_tensor_outputs)):
        if recording.cached_tensor_outputs[number] is not None:
            output: Any = recording.outputs_weakrefs[number]
            output.extra_ref_check = functools.partial(_is_released, reference, number, output.extra_ref_check)
    return held


def release_unneeded(pool: Any) -> bool:
    """Detaches outputs that only their recordings hold from autograd's graphs, as torch 2.15 does; tells if any was.

    Such a graph may hold other outputs, of any recording: tensors saved for it, and tensors saved before. Most of these
    belong to earlier recordings, so the newest is looked at first, and one round releases a whole chain of calls.
    """
    found, recordings = False, list(_by_pool.get(pool, ()))[::-1]
    for _ in range(1 + sum(len(recording.cached_tensor_outputs) for recording in recordings)):
        if not sum(map(_release_autograd, recordings)):
            break
        found = True
    return found


def deaths(recording: Any, indices: list[tuple[int, int]]) -> Deaths | None:
    """The check of whether outputs on the path to a recording (depth, number) are dead; None without outputs."""
    path = list(recording._path_from_root) if indices else []
    places = [
        (path[d].cached_tensor_outputs, recording.path_weakrefs[d], n, path[d].outputs_metadata[n]["data_ptr"])
        for d, n in indices
    ]
    return Deaths(places, functools.partial(release_unneeded, recording.cuda_graphs_pool)) if places else None


def _is_released(recording: Callable[[], Any], number: int, check: Callable[[], bool]) -> bool:
    """Whether only its recording holds a cached output: neither C++ nor a holder of its storage, as ``check`` says."""
    if (node := recording()) is None:
        return check()
    # There are none if an interrupt came while they were removed.
    cached = node.cached_tensor_outputs
    if not cached or cached[number].data_ptr() != node.cached_addresses[number]:
        node.remove_node_cached_tensors()  # from now on the reference counts the holders of the storage that it had
        return True
    # The output must have no name here: it would count. One of the storage's references is its own, one the argument's.
    is_held = (
        node.cached_tensor_outputs[number]._use_count() > 1
        or sys.getrefcount(node.cached_tensor_outputs[number].untyped_storage()) > 2
    )
    if is_held or not check():
        return False
    outputs = node.cached_tensor_outputs  # none if a finalizer has removed them
    if outputs and (
        weakref.getweakrefcount(outputs[number]) or weakref.getweakrefcount(outputs[number].untyped_storage())
    ):
        node.remove_node_cached_tensors()  # otherwise the program would get a tensor whose memory is overwritten
    return True


def _release_autograd(recording: Any) -> bool:
    outputs, found = recording.cached_tensor_outputs, False
    for i in range(len(outputs)):
        # The output must have no name here: only the references of the list and of the argument may count. A finalizer
        # that detaching runs may remove all.
        if (
            i < len(outputs)
            and outputs[i] is not None
            and sys.getrefcount(outputs[i]) == 2
            and outputs[i]._use_count() == 1
            and outputs[i].grad_fn is not None
            and not outputs[i]._is_view()
        ):
            with torch.inference_mode(False):  # inference mode does not detach
                outputs[i].detach_()
            found = True
    return found
