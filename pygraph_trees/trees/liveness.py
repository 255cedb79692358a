"""Who holds the outputs of recordings, which lie in a graph pool.

:class:`PoolOutputs` has the recordings of one pool. An output that its recording alone holds may still keep others
alive, through the graph of a backward that never came: :meth:`PoolOutputs.release_unneeded` detaches it. :func:`deaths`
prepares the question whether some outputs on a path are dead, and :func:`watch` makes upstream's references see what
C++ holds, which matters where upstream does not see what autograd saved.
"""

from __future__ import annotations

import functools
import sys
import weakref
from typing import TYPE_CHECKING, Any, Protocol

import torch

from pygraph_trees import compat
from pygraph_trees.native.tensors import Deaths

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class HoldsOutputs(Protocol):
    """A recording, as far as its outputs go."""

    cached_tensor_outputs: Any
    outputs_weakrefs: Any
    path_weakrefs: Any
    cuda_graphs_pool: Any

    @property
    def _path_from_root(self) -> Iterator[Any]: ...


class PoolOutputs:
    """The recordings of one graph pool that have outputs: those of one manager, which one thread calls at a time."""

    __slots__ = ("__weakref__", "_recordings")

    def __init__(self) -> None:
        self._recordings: weakref.WeakSet[Any] = weakref.WeakSet()

    @staticmethod
    def of(pool: Any) -> PoolOutputs:
        """Those of a pool; they live as long as somebody holds them, which each recording does."""
        found = _by_pool.get(pool)
        if found is None:
            found = _by_pool[pool] = PoolOutputs()
        return found

    def add(self, recording: HoldsOutputs) -> None:
        self._recordings.add(recording)

    def release_unneeded(self) -> bool:
        """Outputs that nobody holds let go of autograd's graphs, as in torch 2.15; whether any did.

        Such a graph may be what holds others: what was saved for it, and what was saved before, of any recording.
        """
        found, recordings = False, list(self._recordings)
        for _ in range(1 + sum(len(recording.cached_tensor_outputs) for recording in recordings)):
            if not sum(map(_release_autograd, recordings)):
                break
            found = True
        return found


_by_pool: weakref.WeakValueDictionary[Any, PoolOutputs] = weakref.WeakValueDictionary()


def release_unneeded(pool: Any) -> bool:
    """:meth:`PoolOutputs.release_unneeded` of a pool, which may have no recordings."""
    found = _by_pool.get(pool)
    return found is not None and found.release_unneeded()


def deaths(recording: HoldsOutputs, indices: list[tuple[int, int]]) -> Deaths | None:
    """Asks for outputs on the path to a recording, by depth and number; None if there are none."""
    path = list(recording._path_from_root) if indices else []
    places = [(path[d].cached_tensor_outputs, recording.path_weakrefs[d], number) for d, number in indices]
    return Deaths(places, functools.partial(release_unneeded, recording.cuda_graphs_pool)) if places else None


def watch(recording: HoldsOutputs) -> None:
    """Upstream's references to cached outputs see what is held in C++ alone, as autograd's saved tensors are."""
    if compat.sees_what_autograd_holds(recording):
        return
    # Upstream takes such an output for dead, and writes over what a backward is to read.
    reference = weakref.ref(recording)
    for number in range(len(recording.cached_tensor_outputs)):
        if recording.cached_tensor_outputs[number] is not None:
            held: Any = recording.outputs_weakrefs[number]
            held.extra_ref_check = functools.partial(_is_released, reference, number, held.extra_ref_check)


def _is_released(recording: Callable[[], Any], number: int, check: Callable[[], bool]) -> bool:
    """Whether a cached output is held by its recording alone: not in C++, and else as upstream's ``check`` has it."""
    node = recording()
    return (node is None or node.cached_tensor_outputs[number]._use_count() == 1) and check()


def _release_autograd(recording: HoldsOutputs) -> bool:
    outputs, found = recording.cached_tensor_outputs, False
    for i in range(len(outputs)):
        # Without a name for the output: references are counted, the list's and the argument's.
        if (
            outputs[i] is not None
            and outputs[i].grad_fn is not None
            and outputs[i]._use_count() == 1
            and sys.getrefcount(outputs[i]) == 2
            and not outputs[i]._is_view()
        ):
            with torch.inference_mode(False):  # where nothing is detached
                outputs[i].detach_()
            found = True
    return found
