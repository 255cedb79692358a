"""Runs a function graphed or un-graphed as its trial decides, during and after the trial.

:func:`chooser` makes a function a member of its graph's trial, if the graph has one. Un-graphed, a function runs as
Inductor runs graphs without CUDA graphs: misaligned inputs are copied first, and copied back if they are mutated. If
torch has no trees for the calling thread, nor for the first one, the function is not graphed.
"""

from __future__ import annotations

import contextlib
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch._inductor import cudagraph_trees

from pygraph_trees.report.naming import BACKWARD
from pygraph_trees.selection.decision import Execution, Handed
from pygraph_trees.selection.device import CudaDevice
from pygraph_trees.selection.functions import trial_of
from pygraph_trees.selection.trial import TrialMember

from . import dispatch as dispatch_module
from .dispatch import PER_THREAD, Way
from .manager import Manager

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

    from .function import FunctionModel

    Run = Callable[[list[Any]], Any]

_TREES = ("tree_manager_containers", "tree_manager_locks")  # dictionaries of each thread, by device


def chooser(
    static_input_idxs: Sequence[int], mutated: Collection[int], device: int
) -> Callable[[FunctionModel, Run], TrialMember | None]:
    """Returns a function that makes a function take part in its graph's trial, if the graph has one.

    After the trial the function refers to its member weakly, because the member holds the function's graphed version.
    """

    def choose(function: FunctionModel, graphed: Run) -> TrialMember | None:
        log, dispatch = function.log, function.dispatch
        trial = trial_of(log, function.settings, device)
        if trial is None:
            return None
        trees = _Trees(device)
        ungraphed = _as_upstream_has_it(_aligned(function, static_input_idxs, mutated), log.mode, trees)

        def first_ungraphed(inputs: list[Any]) -> Any:
            trees.remember()
            return ungraphed(inputs)

        def first_graphed(inputs: list[Any]) -> Any:
            trees.remember()
            with trees.at_hand() as there:
                if there:
                    return graphed(inputs)
            log.not_graphed("torch has no CUDA graph trees for the thread that calls")
            return ungraphed(inputs)

        def until_added(inputs: list[Any]) -> Any:
            outputs = first_graphed(inputs)
            if dispatch.is_added:
                dispatch.go_on()
            return outputs

        def sample(inputs: list[Any]) -> Any:
            found = member()
            dispatch.sampling()
            try:
                return ungraphed(inputs) if found is None else found.sample(inputs)
            finally:
                if dispatch.way is Way.REPLAYED:
                    dispatch.go_on()

        def sample_ungraphed(inputs: list[Any]) -> Any:
            found = member()
            if found is None:
                return ungraphed(inputs)
            manager = trees.manager() if found.is_in_its_thread() else None
            if isinstance(manager, Manager):
                manager.give_pool_back()  # an output in the pool may have been held until now
            return found.sample(inputs)

        def began() -> None:
            dispatch.go(Way.MEASURED, member())

        def ended(way: Execution) -> None:
            if way is Execution.GRAPHED:
                samples = sample if trial.may_restart() else None
                if PER_THREAD or dispatch.is_added:
                    dispatch.go(Way.REPLAYED, sample=samples)
                else:
                    dispatch.go(Way.FIRST_GRAPHED, until_added, sample=samples)
            else:
                dispatch.go(Way.UNGRAPHED, _now_and_then(sample_ungraphed, ungraphed))
                manager = trees.manager()
                if isinstance(manager, Manager):
                    manager.forget(function, later=trial.is_elsewhere)

        function.trial = trial

        def handed() -> Handed:
            manager = trees.manager()
            sizes = handed_on(manager, function) if isinstance(manager, Manager) else []
            if function.settings.indirection == "off":
                return Handed(copied=len(sizes), copied_bytes=sum(sizes))
            return Handed(patched=len(sizes))  # each in at least one kernel

        def has_room() -> bool:
            manager = trees.manager()
            return not isinstance(manager, Manager) or manager.has_room_for_another()

        told = ended, began, handed, has_room
        made = TrialMember(trial, log, first_graphed, first_ungraphed, CudaDevice(device), *told)
        member = weakref.ref(made)
        dispatch.go(Way.MEASURED, made)
        trial.join(made)
        return made

    return choose


def handed_on(manager: Manager, model: FunctionModel) -> list[int]:
    """The sizes in bytes of this function's outputs in the pool that functions of other trials take as inputs.

    Only the newest recordings after the newest recording of this function count.
    """
    own, todo = None, [manager.roots or {}]
    while todo:
        for recordings in todo.pop().values():
            todo += [node.children for node in recordings]
            for node in recordings:
                if node.wrapped_function.model is model and (own is None or node.id.id > own.id.id):
                    own = node
    if own is None:
        return []
    depth, taken = len(list(own._path_from_root)) - 1, []
    after = [found[-1] for found in own.children.values() if found]
    for node in after:  # the list grows meanwhile
        after += [found[-1] for found in node.children.values() if found]
        if getattr(node.wrapped_function.model, "trial", None) is model.trial:
            continue
        for index in node.cudagraph_managed_idxs:
            place = node.live_cudagraph_managed_path_refs[index]
            made = own.outputs_metadata[place[1]] if place is not None and place[0] == depth else None
            if isinstance(made, dict):
                taken.append(made["nbytes"])
    return taken


def _now_and_then(sample: Run, run: Run) -> Run:
    """Calls ``run``, and ``sample`` once every ``SAMPLE_EVERY`` calls."""
    left = dispatch_module.SAMPLE_EVERY

    def call(inputs: list[Any]) -> Any:
        nonlocal left
        left -= 1
        if left > 0:
            return run(inputs)
        left = dispatch_module.SAMPLE_EVERY
        return sample(inputs)

    return call


class _Trees:
    """Torch's trees for one function."""

    def __init__(self, device: int) -> None:
        self._device = device
        self._first: tuple[Any, ...] | None = None  # the trees of the first thread that called
        self._known: Callable[[], Any] | None = None  # a manager must not outlive its functions

    def remember(self) -> None:
        if self._first is None and not PER_THREAD and _are_known():
            self._first = tuple(cudagraph_trees.get_obj(cudagraph_trees.local, name) for name in _TREES)

    @contextlib.contextmanager
    def at_hand(self) -> Iterator[bool]:
        """Inside, torch finds the trees of this thread, or those of the first one; gives whether either exists."""
        if PER_THREAD or _are_known():
            yield True
        elif self._first is None:
            yield False
        else:
            for name, known in zip(_TREES, self._first, strict=True):
                setattr(cudagraph_trees.local, name, known)
            try:
                yield True
            finally:
                for name in _TREES:
                    delattr(cudagraph_trees.local, name)

    def manager(self, *, create: bool = False) -> Any:
        """The manager that a call from this thread uses; None if none exists and ``create`` is false."""
        if PER_THREAD:
            return cudagraph_trees.get_manager(self._device, create_if_none_exists=create)
        found = None if self._known is None else self._known()
        if found is None:
            with self.at_hand() as there:
                found = cudagraph_trees.get_manager(self._device, create_if_none_exists=create) if there else None
            self._known = None if found is None else weakref.ref(found)
        return found


def _are_known() -> bool:
    """Whether torch has already made trees for this thread."""
    return all(hasattr(cudagraph_trees.local, name) or torch._C._is_key_in_tls(name) for name in _TREES)


def _as_upstream_has_it(run: Run, mode: str, trees: _Trees) -> Run:
    """``run``, but upstream's manager is told of an un-graphed forward or backward.

    An un-graphed backward expects that its forward has made a manager. No step begins between a forward and its
    backward, graphed or not.
    """

    def forward(inputs: list[Any]) -> Any:
        waits = trees.manager(create=True)
        outputs = run(inputs)
        if waits is not None:
            waits.running_forwards_with_pending_backwards = True
        return outputs

    def backward(inputs: list[Any]) -> Any:
        waits = trees.manager()
        if waits is not None:
            waits.set_to_running_backward()
        return run(inputs)

    return forward if mode == "forward" else backward if mode == BACKWARD else run


def _aligned(function: FunctionModel, static_input_idxs: Sequence[int], mutated: Collection[int]) -> Run:
    """The compiled code with aligned inputs; the first call, with real inputs, decides which must be aligned."""
    from torch._inductor.compile_fx import get_input_idxs_to_check
    from torch._inductor.utils import align_inputs_from_check_idxs
    from torch.utils._ordered_set import OrderedSet

    run: Run | None = None

    def ungraphed(inputs: list[Any]) -> Any:
        nonlocal run
        if run is None:
            checked = get_input_idxs_to_check(inputs, static_input_idxs)
            run = align_inputs_from_check_idxs(function, checked, OrderedSet(mutated) & OrderedSet(checked))
        return run(inputs)

    return ungraphed
