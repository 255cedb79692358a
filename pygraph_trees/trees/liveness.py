"""Who holds the outputs of recordings, which lie in a graph pool.

:func:`register` counts a recording among those of its pool once it has outputs, and makes upstream's references see
what C++ holds. An output that its recording alone holds may still keep others alive, through the graph of a backward
that never came: :func:`release_unneeded` detaches all such outputs of a pool. :func:`deaths` prepares the question
whether some outputs on a path are dead.
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


# The recordings that have outputs, by their graph pool: those of one manager, which one thread calls at a time.
_by_pool: weakref.WeakValueDictionary[Any, weakref.WeakSet[HoldsOutputs]] = weakref.WeakValueDictionary()


def register(recording: HoldsOutputs) -> object:
    """Counts a recording among those of its pool, as long as it holds what is returned.

    Upstream's references to its cached outputs take an output for dead that autograd alone holds, before torch 2.15;
    they see it from now on.
    """
    held = _by_pool.setdefault(recording.cuda_graphs_pool, weakref.WeakSet())
    held.add(recording)
    if compat.sees_what_autograd_holds(recording):
        return held
    # Upstream would write over what a backward is to read.
    reference = weakref.ref(recording)
    for number in range(len(recording.cached_tensor_outputs)):
        if recording.cached_tensor_outputs[number] is not None:
            output: Any = recording.outputs_weakrefs[number]
            output.extra_ref_check = functools.partial(_is_released, reference, number, output.extra_ref_check)
    return held


def release_unneeded(pool: Any) -> bool:
    """Outputs that nobody holds let go of autograd's graphs, as in torch 2.15; whether any did.

    Such a graph may be what holds others: what was saved for it, and what was saved before, of any recording.
    """
    found, recordings = False, list(_by_pool.get(pool, ()))
    for _ in range(1 + sum(len(recording.cached_tensor_outputs) for recording in recordings)):
        if not sum(map(_release_autograd, recordings)):
            break
        found = True
    return found


def deaths(recording: HoldsOutputs, indices: list[tuple[int, int]]) -> Deaths | None:
    """Asks for outputs on the path to a recording, by depth and number; None if there are none."""
    path = list(recording._path_from_root) if indices else []
    places = [(path[d].cached_tensor_outputs, recording.path_weakrefs[d], number) for d, number in indices]
    return Deaths(places, functools.partial(release_unneeded, recording.cuda_graphs_pool)) if places else None


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
