"""Where a function is chosen by measurement: who is called in its place until it is known, and behind that.

Un-graphed, a function is run as Inductor runs a graph without CUDA graphs: inputs that its kernels take to be aligned
and that are not are copied first, and copied back where they are written to.

If a function does not have trees per thread, upstream looks for a thread's trees when the function is called for the
first time, and not in later calls, which may come from threads that have none. A trial's first graphed call is a later
one, and is made with the trees of the thread that called first (:class:`_Trees`). If that has none either, the function
is not graphed, while upstream has an AssertionError for its first call.
"""

from __future__ import annotations

import contextlib
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch._inductor import cudagraph_trees

from pygraph_trees.report.naming import BACKWARD
from pygraph_trees.selection import trial_of
from pygraph_trees.selection.decision import Execution, Handed
from pygraph_trees.selection.device import CudaDevice
from pygraph_trees.selection.trial import TrialMember

from . import function as function_module
from .function import PER_THREAD
from .manager import Manager

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

    from .function import FunctionModel

    Run = Callable[[list[Any]], Any]

_TREES = ("tree_manager_containers", "tree_manager_locks")  # of a thread, by device


def chooser(
    static_input_idxs: Sequence[int], mutated: Collection[int], device: int
) -> Callable[[FunctionModel, Run], TrialMember | None]:
    """What makes a function take part in its graph's trial, if there is one.

    After the trial the function holds its member weakly, because the member holds what graphs it.
    """

    def choose(function: FunctionModel, graphed: Run) -> TrialMember | None:
        log = function.log
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
            if function.is_added:
                function.instead = None
                function.may_replay(may=True)
            return outputs

        def looked_at(inputs: list[Any]) -> Any:
            found = member()
            if function.instead is looked_at:
                function.instead = None
            try:
                return ungraphed(inputs) if found is None else found.sample(inputs)
            finally:
                if function.instead is None:
                    function.may_replay(may=True)

        def looked_at_ungraphed(inputs: list[Any]) -> Any:
            found = member()
            if found is None:
                return ungraphed(inputs)
            manager = trees.manager() if found.is_in_its_thread() else None
            if isinstance(manager, Manager):
                manager.give_pool_back()  # somebody may have held what lay there
            return found.sample(inputs)

        def began() -> None:
            function.instead, function.looked_at = member(), None
            function.may_replay(may=False)

        def ended(way: Execution) -> None:
            if way is Execution.GRAPHED:
                function.instead = None if PER_THREAD or function.is_added else until_added
                function.looked_at = looked_at if trial.may_restart() else None
                function.may_replay(may=True)
            else:
                function.instead = _now_and_then(looked_at_ungraphed, ungraphed)
                function.may_replay(may=False)
                manager = trees.manager()
                if isinstance(manager, Manager):
                    manager.forget(function, later=trial.is_elsewhere)

        function.trial = trial

        def handed() -> Handed:
            manager = trees.manager()
            sizes = handed_on(manager, function) if isinstance(manager, Manager) else []
            if function.settings.indirection == "off":
                return Handed(copied=len(sizes), copied_bytes=sum(sizes))
            return Handed(patched=len(sizes))  # in one kernel each, at least

        def has_room() -> bool:
            manager = trees.manager()
            return not isinstance(manager, Manager) or manager.has_room_for_another()

        told = ended, began, handed, has_room
        made = TrialMember(trial, log, first_graphed, first_ungraphed, CudaDevice(device), *told)
        member = weakref.ref(made)
        function.instead = made
        trial.join(made)
        return made

    return choose


def handed_on(manager: Manager, model: FunctionModel) -> list[int]:
    """What functions that are decided by themselves take of this one's outputs in the pool, in bytes each.

    The newest recordings after the newest one of this function count.
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
    for node in after:  # which grows
        after += [found[-1] for found in node.children.values() if found]
        if getattr(node.wrapped_function.model, "trial", None) is model.trial:
            continue
        for index in node.cudagraph_managed_idxs:
            place = node.live_cudagraph_managed_path_refs[index]
            made = own.outputs_metadata[place[1]] if place is not None and place[0] == depth else None
            if isinstance(made, dict):
                taken.append(made["nbytes"])
    return taken


def _now_and_then(look: Run, run: Run) -> Run:
    """``run``, but one call of many is a ``look``."""
    left = function_module.LOOK_EVERY

    def call(inputs: list[Any]) -> Any:
        nonlocal left
        left -= 1
        if left > 0:
            return run(inputs)
        left = function_module.LOOK_EVERY
        return look(inputs)

    return call


class _Trees:
    """Torch's trees for one function."""

    def __init__(self, device: int) -> None:
        self._device = device
        self._first: tuple[Any, ...] | None = None  # of the thread that called first
        self._known: Callable[[], Any] | None = None  # a manager must not outlive its functions

    def remember(self) -> None:
        if self._first is None and not PER_THREAD and _are_known():
            self._first = tuple(cudagraph_trees.get_obj(cudagraph_trees.local, name) for name in _TREES)

    @contextlib.contextmanager
    def at_hand(self) -> Iterator[bool]:
        """Whether torch finds trees inside: those of this thread, or else those of the first one."""
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
        """The manager that a call of this thread has to do with, if there is one."""
        if PER_THREAD:
            return cudagraph_trees.get_manager(self._device, create_if_none_exists=create)
        found = None if self._known is None else self._known()
        if found is None:
            with self.at_hand() as there:
                found = cudagraph_trees.get_manager(self._device, create_if_none_exists=create) if there else None
            self._known = None if found is None else weakref.ref(found)
        return found


def _are_known() -> bool:
    """Whether torch has trees for this thread, and need not make them."""
    return all(hasattr(cudagraph_trees.local, name) or torch._C._is_key_in_tls(name) for name in _TREES)


def _as_upstream_has_it(run: Run, mode: str, trees: _Trees) -> Run:
    """``run`` with what upstream's manager is told of a forward or a backward that is not graphed.

    A backward that cannot be graphed expects that its forward has made a manager, and a forward waits for its backward,
    graphed or not: no step begins in between.
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
    """The compiled code; which inputs have to be aligned is asked at the first call, where there are real ones."""
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
