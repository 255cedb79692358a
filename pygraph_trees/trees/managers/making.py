"""Warm-ups and recordings of functions, by the manager that makes them.

Torch holds its capture lock meanwhile. A function that may not be recorded runs un-graphed, and its log says why.
"""

from __future__ import annotations

import functools
import logging
import time
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch._inductor import cudagraph_trees

from pygraph_trees.compat import is_kernel_free
from pygraph_trees.indirection.staged_inputs import NotStaged
from pygraph_trees.outputs.allocations import generated_by_inductor
from pygraph_trees.reasons import Reason, Why

from ..functions.containment import cleaned_up, forget_frames, progress_of
from ..functions.function import FunctionModel
from ..functions.outputs import give_memory
from ..pools.capture_lock import locked_by_torch
from ..pools.collector import paused
from ..recordings.kept_outputs import keeps_outputs
from ..recordings.recording import Recording
from ..recordings.records import siblings_of, why_recorded
from . import input_rules
from .calls import Calls
from .input_rules import Given, Moves
from .reclaiming import recordings_in
from .storms import MOST_ON_PATH, why_stopped
from .verification import Verification

if TYPE_CHECKING:
    from pygraph_trees.indirection.warmups import Warmups
    from pygraph_trees.report.log import FunctionLog, RecordingLog

_log = logging.getLogger("pygraph_trees.trees")

_EXECUTION = cudagraph_trees.ExecutionState.EXECUTION
_BACKWARD = cudagraph_trees.CompilationMode.BACKWARD


class Making(Calls):
    path_state: Any
    _warmups: Warmups
    _moves: Moves

    def _log_of(self, function_id: Any) -> FunctionLog | None:
        model = self.ids_to_funcs[function_id].model
        return model.log if isinstance(model, FunctionModel) else None

    def record_function(self, new_inputs: list[Any], function_id: Any) -> Any:
        return self._make(new_inputs, function_id, self._record, super().record_function)

    def run_eager(self, new_inputs: list[Any], function_id: Any) -> Any:
        return self._make(new_inputs, function_id, self._warm_up, super().run_eager)

    def _make(self, inputs: list[Any], function_id: Any, ours: Callable[..., Any], upstream: Callable[..., Any]) -> Any:
        """Warms a function up or records it: with ``ours``, or with ``upstream`` if it has no log."""
        function = self._log_of(function_id)
        give_memory(inputs)
        # A finalizer that a collection ran here could wait for the lock.
        with paused(), locked_by_torch():
            if function is not None:
                return cleaned_up(self, functools.partial(ours, inputs, function_id, function))
            try:
                return cleaned_up(self, functools.partial(upstream, inputs, function_id))
            finally:
                self.pool.forget()

    def _record(self, new_inputs: list[Any], function_id: Any, function: FunctionLog) -> Any:
        # Upstream checked this before it ended the last step's path, when outputs of that step were still managed.
        given = self._given(new_inputs, function_id)
        model = given.function.model
        lost = Reason.LOSES_WRITES() if given.would_lose_writes() else None
        why_not = lost or input_rules.why_not_staged(model, new_inputs) or self._why_stopped(model, function_id)
        if why_not is not None:
            if self.path_state is _EXECUTION and self.current_node is not None:
                self.path_state = cudagraph_trees.ExecutionState.RECORDING  # so it is for the allocator
            return self.run_ungraphed(new_inputs, function_id, why_not)
        reason = self.reclaiming.why_again(function_id) or why_recorded(self, new_inputs, function_id, function)
        self._demote(given, function_id)
        verification = self._verification(given)
        own = getattr(given.function, "own", None)
        model.lanes.look_up(function_id, new_inputs[: own and own.takes], self.device_index)
        before = self.pool.nbytes()
        start = time.perf_counter()
        if (progress := progress_of(model)) is not None:
            progress.is_recording = True
            progress.hold()
        try:
            outputs = super().record_function(new_inputs, function_id)
        except NotStaged as error:
            if not new_inputs:
                raise
            forget_frames(error)
            why_not = Reason.ON_CPU_UNREAD(**error.fields)
            if self.current_node is not None:
                self.path_state = cudagraph_trees.ExecutionState.RECORDING  # so it is for the allocator
        except BaseException:
            if self.current_node is not None and model.settings.indirection != "off":
                self.path_state = cudagraph_trees.ExecutionState.RECORDING
            raise
        finally:
            self.pool.forget()
        if why_not is not None:
            return self.run_ungraphed(new_inputs, function_id, why_not)
        record_s = time.perf_counter() - start
        log = getattr(self.current_node, "log", None)
        if log is None:  # the patches were removed, and upstream's own recording was made
            return outputs
        model.lacking.pop(function_id, None)
        log.record_s = record_s
        log.reason = reason
        log.pool_bytes = self.pool.nbytes() - before
        function.recorded(log)
        if limit := model.settings.pool_bytes:
            nbytes = self.pool.nbytes() + self.output_policy.held_bytes(self)
            if self.reclaiming.limit(self, nbytes, limit):
                self.output_policy.release(self)
        self._let_chooser_rerecord(self.current_node, function_id)
        self._let_lanes_rerecord(model, function_id, log)
        if verification is not None:
            verification.check(self.current_node, outputs, function.name)
        self.output_policy.recorded(self, self.current_node, self.pool.nbytes())
        return outputs

    def _why_stopped(self, model: FunctionModel, function_id: Any) -> Why | None:
        """Why a function is not recorded again and runs un-graphed from now on; None if it is recorded."""
        if model.stop is None:
            return None
        path = () if self.current_node is None else self.current_node._path_from_root
        on_path = [node for node in path if node.wrapped_function.model is model]
        why = why_stopped(siblings_of(self, function_id), on_path, model.log.recordings[-MOST_ON_PATH:])
        if why is not None:
            model.stop(why)
        return why

    def _let_chooser_rerecord(self, recording: Recording, function_id: Any) -> None:
        """Lets the choice of a recording's route cause another recording, with a table."""
        chooser = None if recording.live is None else recording.live.addresses.chooser
        if chooser is None:
            return
        reclaiming, number = weakref.ref(self.reclaiming), recording.log.number

        def ready(why: Why) -> None:
            if (found := reclaiming()) is not None and not found.is_alike:
                found.record_again(function_id, why, number)

        chooser.ready = ready

    def _let_lanes_rerecord(self, model: FunctionModel, function_id: Any, log: RecordingLog) -> None:
        """Lets a function be recorded on lanes, or without them if the graph pool has grown too much."""
        if (why := model.lanes.recorded(function_id, log)) is not None:
            self.reclaiming.record_again(function_id, why, log.number)
        why = self.reclaiming.lanes.recorded(function_id, model.lanes, log, self.pool.nbytes())
        if why is not None:
            self.give_lanes_back(why)

    def give_lanes_back(self, why: Why) -> None:
        """Starts over later, because of the memory that lanes take."""
        if not self.reclaiming.is_alike:
            self.start_over_later(why)

    def free_memory_of_lanes(self) -> None:
        """Starts over later, after the last trial, if recordings on lanes that do not pay hold much memory."""
        logs = (getattr(node, "log", None) for node in recordings_in(self.roots))
        if any(log is not None and log.is_tried for log in logs) or any(map(self.reclaiming.awaits, self.ids_to_funcs)):
            return
        if (why := self.reclaiming.lanes.why_wasted(self.pool.nbytes)) is not None:
            self.give_lanes_back(why)

    def _given(self, inputs: list[Any], function_id: Any) -> Given:
        is_managed = self._get_cuda_graph_recorded_tensor_checker()
        return Given(self.ids_to_funcs[function_id], inputs, self.device_index, self.pool, is_managed)

    def _demote(self, given: Given, function_id: Any) -> None:
        """Makes inputs that move live from now on."""
        if input_rules.uses_addresses(given.function.model) and not is_kernel_free(given.function):
            forward = self.current_node if self.id_to_mode[function_id] is _BACKWARD else None
            self.ids_to_funcs[function_id] = given.demoted(siblings_of(self, function_id), self._moves, forward)

    def _verification(self, given: Given) -> Verification | None:
        model = given.function.model
        if not isinstance(model, FunctionModel) or model.settings.verify == "off":
            return None
        if model.log.has_collective:
            _log.info("%s: not verified: other ranks would have to call its collectives again too", model.log.name)
            return None
        kept = [i for i, t in enumerate(given.inputs) if isinstance(t, torch.Tensor) and not given.is_managed(t)]
        return Verification(given.inputs, kept)

    def _warm_up(self, new_inputs: list[Any], function_id: Any, function: FunctionLog) -> Any:
        function.warmups += 1
        before = self.pool.nbytes()
        was_warm = function_id in self.warmed_up_functions
        try:
            with self._warming_up(new_inputs, function_id), self._watching(new_inputs, function_id) as found:
                outputs = super().run_eager(new_inputs, function_id)
        except BaseException as error:
            if not was_warm and not isinstance(error, Exception):  # stopped: its kernels may not be chosen yet
                self.warmed_up_functions.discard(function_id)
            node = self.current_node
            is_ours = self.ids_to_funcs[function_id].model.settings.indirection != "off"  # otherwise as upstream
            if is_ours and isinstance(node, cudagraph_trees.CUDAWarmupNode):
                # It has fewer outputs than stack traces, and torch before 2.13 asserts that it has as many.
                node.stack_traces = list(node.stack_traces or ())[: len(node.tensor_weakrefs)]
            raise
        finally:
            self.pool.forget()
        if found is not None:
            found(outputs, self.pool.holds)
        function.warmup_pool_bytes += self.pool.nbytes() - before
        self.reclaiming.lanes.known[function_id] += 1
        return outputs

    def _watching(self, inputs: list[Any], function_id: Any) -> AbstractContextManager[Any]:
        model = self.ids_to_funcs[function_id].model
        may_have_own = keeps_outputs(model) and function_id not in self.output_policy.storages
        may_have_own = may_have_own and input_rules.uses_addresses(model) and input_rules.knows_its_writes(model)
        if may_have_own and generated_by_inductor(model.model):
            return self.output_policy.watched(self, function_id, inputs)
        return nullcontext()

    def _warming_up(self, inputs: list[Any], function_id: Any) -> AbstractContextManager[None]:
        wrapped = self.ids_to_funcs[function_id]
        indirection = wrapped.model.settings.indirection if input_rules.uses_addresses(wrapped.model) else "off"
        if indirection not in ("auto", "table"):
            return nullcontext()
        is_backward = self.id_to_mode[function_id] is _BACKWARD
        given = self.get_curr_generation(), inputs, wrapped.static_input_idxs, self.device_index, self.pool
        return self._warmups.begin(wrapped.model, *given, is_backward=is_backward, builds=indirection == "table")
