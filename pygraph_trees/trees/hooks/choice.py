"""Runs a function graphed or un-graphed as its trial decides, during and after the trial.

Un-graphed, a function runs as Inductor runs graphs without CUDA graphs: misaligned inputs are copied first, and copied
back if they are mutated.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from torch._inductor import config, cudagraph_trees

from pygraph_trees.cuda.progress import CudaDevice
from pygraph_trees.native import binding
from pygraph_trees.reasons import Reason, Why
from pygraph_trees.report.naming import BACKWARD, FORWARD
from pygraph_trees.selection.decision import Execution
from pygraph_trees.selection.functions import trial_of
from pygraph_trees.selection.trial import Environment, TrialMember

from ..functions import home
from ..functions.fast_path import Call
from ..functions.function import Aligned, FunctionModel
from ..managers.manager import Manager
from ..managers.reclaiming import recordings_in
from ..managers.storms import COMES_AGAIN, FIRST_SIZES, REFUSED, Sizes
from ..pools import pools

if TYPE_CHECKING:
    from pygraph_trees.selection.trial import Trial

_MOST_BELOW = 8  # recordings that a trial may cause to be made again
_MOST_TRIES = 64  # un-graphed calls after a decision that try to give the graph pool back


def chooser(device: int) -> Callable[[FunctionModel, Call, Aligned], TrialMember | None]:
    """Returns a function that makes a function of this device a member of its trial, if it has one."""

    def choose(function: FunctionModel, graphed: Call, aligned: Aligned) -> TrialMember | None:
        trial = trial_of(function.log, function.settings, device, has_fast_path=binding.extension is not None)
        if trial is None:
            return None
        choice = _Choice(function, trial, device, aligned)
        made = TrialMember(function.log, graphed, choice.ungraphed, CudaDevice(device), choice)
        choice.member = weakref.ref(made)
        function.trial, function.stop = trial, choice.stop
        function.dispatch.go(choice.measured)
        trial.join(made)
        return made

    return choose


class _Choice(Environment):
    """Makes the calls of one function each way, and answers its trial's questions about them.

    It refers weakly to the function's member, which holds the function's graphed version: torch would keep both.
    """

    member: Callable[[], TrialMember | None]

    def __init__(self, function: FunctionModel, trial: Trial, device: int, aligned: Aligned) -> None:
        self._function, self._dispatch, self._trial, self._device = function, function.dispatch, trial, device
        self._aligned, self.ungraphed = aligned, as_upstream_has_it(aligned, function.log.mode, device)
        self._is_stopped = False
        self._tries = _MOST_TRIES  # left

    def measured(self, inputs: list[Any]) -> Any:
        member = self.member()
        return self.ungraphed(inputs) if member is None else self._trial.call(member, inputs)

    def until_given_back(self, inputs: list[Any]) -> Any:
        """Makes un-graphed calls until the pool is given back: the program may hold an output in it until then."""
        self._tries -= 1
        manager = self._manager() if (member := self.member()) is not None and member.is_in_its_thread() else None
        if (manager is not None and manager.give_pool_back()) or self._tries <= 0:
            self._go_ungraphed()
        return self.ungraphed(inputs)

    def stop(self, why: Why) -> None:
        """Lets the function run un-graphed from the next call on, whatever its trial decides."""
        self._is_stopped = True
        self._function.log.not_graphed(why)
        self._go_ungraphed()
        if (member := self.member()) is not None:
            self._trial.leave(member)
        if (manager := self._manager()) is not None:
            manager.forget(self._function, later=True)

    def _go_ungraphed(self) -> None:
        self._dispatch.go(self.ungraphed, is_graphed=False, needs_checks=self.ungraphed is not self._aligned)

    def _manager(self) -> Manager | None:
        manager = cudagraph_trees.get_manager(self._device, create_if_none_exists=False)
        return manager if isinstance(manager, Manager) else None

    def ended(self, way: Execution) -> None:
        if self._is_stopped:
            return
        if way is Execution.GRAPHED:
            self._dispatch.go()
            return
        self._dispatch.go(self.until_given_back, is_graphed=False)
        if (manager := self._manager()) is not None:
            manager.forget(self._function)

    def handed(self) -> int:
        manager = self._manager()
        return 0 if manager is None else handed_on(manager, self._function)

    def why_not_tried(self) -> Why | None:
        if (manager := self._manager()) is None:
            return None
        if (below := recordings_below(manager, self._function)) > _MOST_BELOW:
            return Reason.RECORDED_BELOW(count=below)
        return None if has_room_for_another(manager) else Reason.NO_ROOM()


def has_room_for_another(manager: Manager) -> bool:
    """Whether the GPU has 10% more memory free, of what the process may take, than the graph pool takes."""
    pool = manager.pool.nbytes()
    return pools.free_bytes(manager.device_index, pool) > 1.1 * pool


def only_sizes_that_come_again(
    function: FunctionModel, run: Call, inputs: Sequence[Any], aligned: Aligned, device: int
) -> Call:
    """``run``, but with "auto", a function of integers is graphed only for the sets that :class:`Sizes` chooses."""
    indices = [index for index, value in enumerate(inputs) if isinstance(value, int)]
    # If the program names sizes, torch graphs those alone, and others must not count. Other ranks may have other sizes.
    is_left_alone = config.triton.cudagraph_capture_sizes is not None or function.may_have_collective
    if not indices or function.settings.selective != "auto" or is_left_alone:
        return run
    sizes, dispatch, integers = Sizes(), function.dispatch, operator.itemgetter(*indices)
    ungraphed = as_upstream_has_it(aligned, function.log.mode, device)
    replayed = 0  # replays so far, when they were counted last, which takes long if there are many recordings
    why = Reason.OTHER_SIZES(graphed=FIRST_SIZES, calls=COMES_AGAIN)

    def instead(inputs: list[Any]) -> Any:
        """After many un-graphed calls, makes calls without other checks; None for one with sizes that are graphed."""
        if sizes.are_graphed(integers(inputs)):
            dispatch.go()
            return None
        return ungraphed(inputs)

    def call(inputs: list[Any]) -> Any:
        nonlocal replayed
        aligned.decide(inputs)
        if sizes.are_graphed(integers(inputs)):
            return run(inputs)
        function.log.not_graphed(why)
        before = replayed
        if sizes.refused >= REFUSED and (replayed := function.log.replays) != before:
            sizes.refused = 1  # calls that C++ replayed did not come here
        if sizes.refused >= REFUSED:
            if function.trial is not None:
                function.trial.give_up()
            if dispatch.call is None:
                dispatch.go(instead, is_graphed=False, needs_checks=ungraphed is not aligned)
        return ungraphed(inputs)

    return call


def _of(manager: Manager, model: FunctionModel) -> list[Any]:
    return [node for node in recordings_in(manager.roots or {}) if node.wrapped_function.model is model]


def _shares_trial(node: Any, model: FunctionModel) -> bool:
    return getattr(node.wrapped_function.model, "trial", None) is model.trial


def recordings_below(manager: Manager, model: FunctionModel) -> int:
    """The most recordings of other trials that follow any one recording of a function.

    If the function runs un-graphed, other recordings precede them, so they are made again.
    """
    counts = (sum(not _shares_trial(n, model) for n in recordings_in(own.children)) for own in _of(manager, model))
    return max(counts, default=0)


def handed_on(manager: Manager, model: FunctionModel) -> int:
    """How often the newest recordings after this function's newest one, of other trials, take its outputs."""
    if (own := max(_of(manager, model), key=lambda node: node.id.id, default=None)) is None:
        return 0
    depth, taken = len(list(own._path_from_root)) - 1, 0
    after = [found[-1] for found in own.children.values() if found]
    for node in after:  # the list grows meanwhile
        after += [found[-1] for found in node.children.values() if found]
        if not _shares_trial(node, model):
            places = [node.live_cudagraph_managed_path_refs[index] for index in node.cudagraph_managed_idxs]
            taken += sum(place is not None and place[0] == depth for place in places)
    return taken


def as_upstream_has_it(run: Call, mode: str, device: int, manager: Any = None) -> Call:
    """``run``, but upstream's manager is told of un-graphed forwards and backwards: no step begins between the two.

    An un-graphed backward expects that its forward has made a manager. If its thread has none, ``manager`` is told.
    """
    if mode not in (FORWARD, BACKWARD):
        return run
    is_forward, given = mode == FORWARD, (lambda: None) if manager is None else weakref.ref(manager)

    def call(inputs: list[Any]) -> Any:
        if not is_forward and home.is_left_out(device):
            return run(inputs)
        waits, has_turn = cudagraph_trees.get_manager(device, create_if_none_exists=is_forward) or given(), True
        if isinstance(waits, Manager):
            has_turn = waits.note_ungraphed(inputs, is_forward=is_forward)
        if waits is not None and not is_forward and has_turn:
            waits.set_to_running_backward()
        outputs = run(inputs)
        if waits is not None and is_forward:
            waits.running_forwards_with_pending_backwards = True
        return outputs

    return call
