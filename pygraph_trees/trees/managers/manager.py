"""A tree manager that gives inputs by address and logs each recording with its reason.

:class:`Manager` subclasses the installed ``CUDAGraphTreeManager`` and replaces it. It decides as upstream does, except
for functions that mutate live inputs and for static inputs that move (:mod:`.input_rules`). Functions that were added
before the patches also work, but have no log.
"""

from __future__ import annotations

import functools
import logging
from typing import TYPE_CHECKING, Any

import torch
from torch._inductor import cudagraph_trees

from pygraph_trees.compat import has_skip_table
from pygraph_trees.indirection.retired import release_retired
from pygraph_trees.indirection.warmups import Warmups
from pygraph_trees.native import build
from pygraph_trees.outputs.policy import OutputPolicy
from pygraph_trees.reasons import Reason

from ..functions import fast_path
from ..functions.containment import cleaned_up
from ..functions.function import FunctionModel
from ..functions.home import is_used_elsewhere
from ..functions.threads import mark
from ..pools import pools
from ..pools.capture_lock import idle_device, locked_by_torch
from ..pools.collector import paused
from ..pools.interrupts import deferred
from ..pools.pools import ranges_of
from ..recordings.kept_outputs import keeps_outputs, models_that_keep, move_alive, why_not_moved
from . import input_rules
from .candidates import find
from .input_rules import Moves
from .making import Making
from .reclaiming import Reclaiming, recordings_in

if TYPE_CHECKING:
    from pygraph_trees.indirection.pool import PoolRanges

_log = logging.getLogger("pygraph_trees.trees")

_EXECUTION = cudagraph_trees.ExecutionState.EXECUTION
_SKIP_TABLE = "skip_cudagraph" if has_skip_table() else "non_cudagraph_managed_mutation_hint"


def _hashed_by_identity(kind: type) -> Any:
    """A kind of id: each is made once, and upstream hashes a tuple a dozen times per replay. Logs show the name."""
    return type(kind.__name__, (kind,), {"__slots__": (), "__hash__": object.__hash__})


_FunctionID, _GraphID = map(_hashed_by_identity, (cudagraph_trees.FunctionID, cudagraph_trees.GraphID))


class Manager(Making):
    """The recordings of one device and one thread."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # By function, then by the recording that was replayed before, or None if no path is open. Candidates at the
        # roots that are valid after any recording when a step begins are also stored with the key True.
        self._candidates, self._find = {}, find  # a fast replay reads them
        self.reclaiming = Reclaiming(functools.partial(type(self), *args, **kwargs), self._candidates)
        self._warmups = Warmups()
        self._moves = Moves()
        self.output_policy = OutputPolicy()
        build.announce()
        with locked_by_torch():  # it captures an empty graph
            cleaned_up(self, functools.partial(super().__init__, *args, **kwargs))
        thread = mark()
        self.thread = None if thread is None else thread.number
        self.ordered_device = getattr(self, "device_index", -1)
        pools.OWNED[self.cuda_graphs_thread_pool] = self

    def add_function(self, model: Any, inputs: list[Any], *args: Any, **kwargs: Any) -> Any:
        # Read before the function's first call consumes the inputs.
        integers = {index: value for index, value in enumerate(inputs) if isinstance(value, int)}
        if isinstance(model, FunctionModel) and model.may_have_collective:
            self.reclaiming.decide_alike()
        run, outputs = super().add_function(model, inputs, *args, **kwargs)
        self.keeps_outputs = self.keeps_outputs or keeps_outputs(model)
        if isinstance(model, FunctionModel):  # not before: if the first call fails, the function is added again
            model.log.why_not_kept = why_not_moved() if model.settings.outputs == "keep" else None
            model.dispatch.add(self, run.keywords["function_id"], integers)
        return run, outputs

    @property
    def ends_steps(self) -> bool:
        """Whether a new step always ends the last step's path, so that outputs that are alive are moved."""
        return self.keeps_outputs or (fast_path.MAY_CLONE and self.has_live_user_visible_output_cloning)

    def try_end_curr_execution(self, *args: Any, **kwargs: Any) -> None:
        self.by_one_answer(self._keep_outputs, functools.partial(super().try_end_curr_execution, *args, **kwargs))

    def try_end_curr_recording(self, function_id: Any) -> None:
        self.by_one_answer(self._keep_outputs, functools.partial(super().try_end_curr_recording, function_id))
        self.give_back()

    def try_end_curr_warmup(self, function_id: Any) -> None:
        self.by_one_answer(self._keep_outputs, functools.partial(super().try_end_curr_warmup, function_id))
        self.give_back()

    def give_back(self) -> None:
        """Gives back recordings that are not needed, unless a path is open. The current call may make new ones."""
        if self.reclaiming.forgotten and self.current_node is None:
            self.reclaiming.give_back(self)

    def _keep_outputs(self, *, is_last: bool = False) -> None:
        """Moves outputs that are alive if a new step begins, or if ``is_last``."""
        node = self.current_node
        if self.keeps_outputs and node is not None and (is_last or self.can_start_new_generation()):
            if torch.cuda.is_current_stream_capturing():  # a copy would be made at each replay of the program's graph
                if is_last:
                    self.reclaiming.keep_pool(self)
                return
            # Looking at all outputs of a long path takes longer than an un-graphed forward. C++ asks the same.
            is_known = self.path_state is _EXECUTION and getattr(node, "has_fast_path", False)
            if is_known and not is_last and (node.outliving is None or node.outliving.are_dead()):
                return
            with idle_device(self.device_index):  # replays, and the program's reads and writes, may be on any streams
                move_alive(node)
            self.output_policy.moved(self, models_that_keep(node))

    def move_last_outputs(self) -> None:
        """Moves outputs that are alive, before the graph pool is freed; logs a warning if that is impossible."""
        try:
            with deferred():
                self._keep_outputs(is_last=True)
        except Exception as error:  # no memory is free, or the GPU is lost
            _log.warning("outputs could not be moved, so their graph pool stays until they are gone: %s", error)
            self.reclaiming.keep_pool(self)

    def new_func_id(self) -> Any:
        return _FunctionID(next(self.func_counter))

    def new_graph_id(self) -> Any:
        return _GraphID(next(self.graph_counter))

    def is_graphed(self, function_id: Any, node_id: Any) -> bool:
        """Whether upstream is known to graph a function at a place; if it mutates inputs, upstream decides once."""
        skipped = self._skip_table()[node_id].get(function_id)
        if skipped or (skipped is None and self.ids_to_funcs[function_id].mutated_input_idxs):
            return False
        return not self.exceed_rerecord_limit(node_id, function_id)

    def execute_node(self, node: Any, new_inputs: list[Any]) -> Any:
        outputs = super().execute_node(node, new_inputs)
        if getattr(node, "has_fast_path", False) and not is_used_elsewhere(self.device_index):
            function = node.wrapped_function
            function.model.dispatch.may_be_replayed_by(self, function.id, getattr(node.own, "native", None))
        return outputs

    def shutdown(self) -> None:
        self.move_last_outputs()
        self._candidates.clear()
        self.reclaiming.clear()
        self.output_policy.release(self)
        for node in recordings_in(self.roots or {}):
            node.native = None  # it holds the graph too
        super().shutdown()
        with paused():  # a finalizer could wait for the lock
            release_retired()

    def forget(self, model: FunctionModel, *, later: bool = False) -> None:
        """Gives back a function's recordings and own memory; during a call, recordings follow later."""
        inputs: list[Any] = []
        with deferred():
            self.output_policy.release(self, model)
            try:
                is_free = self.take_aside(inputs)
                self.reclaiming.forget(self, model, later=later or not is_free)
            except Exception as error:
                self.failed(error)
            finally:
                self.end_turn(inputs)

    def give_pool_back(self) -> bool:
        """:meth:`.Reclaiming.give_pool_back`, but not during a call."""
        inputs: list[Any] = []
        with deferred():
            try:
                return self.take_aside(inputs) and self.reclaiming.give_pool_back(self)
            except Exception as error:
                self.failed(error)
                return False
            finally:
                self.end_turn(inputs)

    def _run(self, new_inputs: list[Any], function_id: Any) -> Any:
        # When a step begins, upstream looks for a child of the last step's recording, finds none, ends the path and
        # starts again. If no child exists, this ends the path at once.
        self._candidates.clear()
        if self.keeps_outputs and self.path_state is _EXECUTION and self.can_start_new_generation():
            self.try_end_curr_execution()
        self.give_back()
        node, function = self.current_node, self.ids_to_funcs[function_id]
        is_on_path = node is not None and self.path_state is _EXECUTION and function_id in self.roots
        if is_on_path and not node.children.get(function_id) and not function.mutated_input_idxs:
            self.try_end_curr_execution()
            self.give_back()
        # This must be known before upstream prepares a recording, which changes the state of the allocator.
        if self.path_state is _EXECUTION and self.current_node is not None and function_id in self.warmed_up_functions:
            why_not = input_rules.why_not_staged(self.ids_to_funcs[function_id].model, new_inputs)
            if why_not is not None:
                self.try_end_curr_execution()
                return self.run_ungraphed(new_inputs, function_id, why_not)
        return super()._run(new_inputs, function_id)

    @property
    def pool(self) -> PoolRanges:
        self._ranges = ranges_of(self.device_index, self.cuda_graphs_thread_pool)  # held as long as it has this pool
        return self._ranges

    def _update_non_cudagraph_managed_mutation(self, function_id: Any, inputs: list[Any]) -> None:
        model = self.ids_to_funcs[function_id].model
        knows = input_rules.uses_addresses(model) and input_rules.knows_its_writes(model)
        if knows and not self._given(inputs, function_id).would_lose_writes():
            self._skip_table()[self._get_node_id()][function_id] = False
            return
        super()._update_non_cudagraph_managed_mutation(function_id, inputs)
        function = self._log_of(function_id)
        if function is not None and self._skip_table()[self._get_node_id()].get(function_id):
            function.not_graphed(Reason.MUTATES())

    def _skip_table(self) -> Any:
        return getattr(self, _SKIP_TABLE)
