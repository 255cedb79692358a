"""Where a function is chosen by measurement: who is called in its place until it is known, and behind that.

Un-graphed, a function is run as Inductor runs a graph without CUDA graphs: inputs that its kernels take to be aligned
and that are not are copied first, and copied back where they are written to.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from torch._inductor import cudagraph_trees

from pygraph_trees.coverage.naming import BACKWARD
from pygraph_trees.selection import trial_of
from pygraph_trees.selection.decision import Way
from pygraph_trees.selection.trial import Contestant, GpuWatch

from .manager import Manager

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from .function import FunctionModel

    Run = Callable[[list[Any]], Any]


def chooser(
    static_input_idxs: Sequence[int], mutated: Collection[int], device: int
) -> Callable[[FunctionModel, Run], None]:
    """What makes a function take part in its graph's trial, if there is one."""

    def choose(function: FunctionModel, graphed: Run) -> None:
        log = function.log
        trial = trial_of(log, function.settings, device)
        if trial is None:
            return
        ungraphed = _as_upstream_has_it(_aligned(function, static_input_idxs, mutated), log.mode, device)

        def ended(way: Way) -> None:
            if way is Way.GRAPHED:
                function.instead = None
                function.may_replay(may=True)
            else:
                function.instead = ungraphed
                function.may_replay(may=False)
                log.not_graphed("it was measured to be faster so")
                manager = _manager(device)
                if isinstance(manager, Manager):
                    manager.forget(function)

        function.trial = trial
        function.instead = contestant = Contestant(trial, log, graphed, ungraphed, GpuWatch(device), ended)
        trial.join(contestant)

    return choose


def _manager(device: int) -> Any:
    """This thread's, if there is one."""
    return cudagraph_trees.get_manager(device, create_if_none_exists=False)


def _as_upstream_has_it(run: Run, mode: str, device: int) -> Run:
    """``run`` with what upstream's manager is told of a forward or a backward that is not graphed.

    A backward that cannot be graphed expects that its forward has made a manager, and a forward waits for its backward,
    graphed or not: no step begins in between. Upstream looks for the manager where a function is called for the first
    time, and not in later calls, which may come from threads that it knows nothing of.
    """
    known: Callable[[], Any] | None = None  # a manager must not outlive its functions

    def manager() -> Any:
        nonlocal known
        found = None if known is None else known()
        if found is None:
            found = cudagraph_trees.get_manager(device, create_if_none_exists=mode == "forward")
            known = None if found is None else weakref.ref(found)
        return found

    def forward(inputs: list[Any]) -> Any:
        waits = manager()
        outputs = run(inputs)
        if waits is not None:
            waits.running_forwards_with_pending_backwards = True
        return outputs

    def backward(inputs: list[Any]) -> Any:
        waits = manager()
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
