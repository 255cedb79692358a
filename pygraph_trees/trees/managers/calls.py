"""Calls of a manager, one at a time; what follows from errors in them; and when a step begins.

A call has the turn from before it reads the trees until its graph is launched. No call waits for it: calls that come
meanwhile, from a finalizer, a hook or another thread, run un-graphed. A step begins by torch's rules, also if calls run
un-graphed or a backward never comes, and ends the last step's path.
"""

from __future__ import annotations

import gc
import logging
import time
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch._inductor import cudagraph_trees

from pygraph_trees.reasons import Reason, Why

from ..functions import fast_path
from ..functions.containment import UnreadablePool, check_readable, contained, described, is_of_program, passes
from ..functions.function import FunctionModel
from ..functions.home import is_used_elsewhere
from ..functions.outputs import give_memory
from ..pools import program_pools
from ..pools.capture_lock import idle_device
from ..pools.interrupts import deferred
from ..pools.liveness import release_unneeded
from ..recordings.kept_outputs import keeps_outputs, move_alive, note_launch_of
from .storms import is_endless

if TYPE_CHECKING:
    from pygraph_trees.outputs.policy import OutputPolicy

    from .reclaiming import Reclaiming

_log = logging.getLogger("pygraph_trees.trees")

Upstream: type = cudagraph_trees.CUDAGraphTreeManager
_STATE = cudagraph_trees.ExecutionState
_unreadable: dict[int, Why] = {}  # devices where the state of a pool could not be read; recording again could crash
_FORWARD, _BACKWARD = cudagraph_trees.CompilationMode.FORWARD, cudagraph_trees.CompilationMode.BACKWARD


class Calls(fast_path.TreeState, Upstream):
    reclaiming: Reclaiming
    output_policy: OutputPolicy
    pool: Any  # its address ranges
    why_start_over: Why | None = None  # why all recordings are dropped at the next call
    starts_over_later = False  # not before a step begins
    doubt: Why | None = None  # the error after which memory of the pool may be in use that no recording accounts for
    _candidates: dict[Any, Any]
    keeps_outputs: bool  # whether a function was added whose outputs must be kept
    _begins_step: bool | None = None  # the answer of can_start_new_generation while a path may end
    asides = 0  # turns that were not for a graphed call
    _ungraphed = 0  # un-graphed forwards since the last un-graphed call that began a step or was a backward

    def run(self, new_inputs: list[Any], function_id: Any) -> Any:
        if self.has_turn(new_inputs):  # upstream begins again, at a root
            return super().run(new_inputs, function_id)
        try:
            with deferred():
                return self._run_in_turn(new_inputs, function_id)
        except BaseException:  # also an interrupt that had to wait
            log = getattr(self.current_node, "log", None)
            if log is not None and not log.replays:
                log.was_interrupted = True
            raise

    def _run_in_turn(self, new_inputs: list[Any], function_id: Any) -> Any:
        try:
            # Another thread may have taken over since the call was let in.
            if not self.take_turn(new_inputs) or is_used_elsewhere(self.device_index):
                return self._run_beside(new_inputs, function_id)
            self.order_streams()
            before = self._latest_launch()
            outputs = self._run_contained(new_inputs, function_id)
            if self._latest_launch() != before:  # otherwise it ran un-graphed
                note_launch_of(self.current_node, self.last_stream)
            return outputs
        finally:
            self.note_launch()
            self.end_turn(new_inputs)

    def _latest_launch(self) -> tuple[Any, object]:
        """The recording or warm-up that ends the open path, and how often it was launched."""
        node = self.current_node
        if node is None or isinstance(node, cudagraph_trees.CUDAWarmupNode):
            return node and weakref.ref(node), 1
        return weakref.ref(node), getattr(getattr(node, "log", None), "replays", object())  # torch's own do not count

    def _run_contained(self, inputs: list[Any], function_id: Any) -> Any:
        model, upstream = self.ids_to_funcs[function_id].model, super().run

        def run() -> Any:
            if (why := self._start_over()) is not None:
                return self.run_ungraphed(inputs, function_id, why)
            with self.output_policy.call(self, function_id, inputs):
                return upstream(inputs, function_id)

        if not isinstance(model, FunctionModel) or model.settings.indirection == "off":  # as upstream
            return run()
        why = _unreadable.get(self.device_index) or model.why_ungraphed or model.why_waits(function_id)
        if why is not None:
            self._start_over()
            if model.why_ungraphed is not None and model.stop is not None:  # now: it frees what the failed call used
                model.stop(model.why_ungraphed)
                model.stop = None
            if (own := getattr(self.ids_to_funcs[function_id], "own", None)) is not None:
                own.native.release()
            if (mode := self.id_to_mode[function_id]) in (_FORWARD, _BACKWARD):
                self.note_ungraphed_in_turn(is_forward=mode == _FORWARD)
            return self.run_ungraphed(inputs, function_id, why)
        return contained(self, run, inputs, function_id)

    def failed(self, error: Exception, function_id: Any = None) -> None:
        """Drops all recordings and the graph pool at the next call, unless the error passes (:func:`.passes`).

        A function whose call failed warms up again. Raises ``error`` if the program's code raised it.
        """
        if is_of_program(error):
            raise error
        if passes(error):
            return
        _log.info("CUDA graphs start over", exc_info=error)
        self.why_start_over, self.starts_over_later = described(error), False
        if isinstance(error, UnreadablePool):
            _unreadable[self.device_index] = self.why_start_over
        self._candidates.clear()
        self.warmed_up_functions.discard(function_id)

    def note_doubt(self, why: Why) -> None:
        """Lets the next call look for memory of the pool that is in use and that no recording accounts for."""
        self.doubt = why
        self._candidates.clear()

    def start_over_later(self, why: Why) -> None:
        """Drops all recordings and the graph pool when a step begins; also during a call."""
        if self.why_start_over is None:
            self.why_start_over, self.starts_over_later = why, True
            self._candidates.clear()

    def _has_unknown_memory(self) -> bool:
        """Whether other memory of the pool is in use than that of outputs on the open path, for example by an error.

        Torch would give it out again with the next recording, and end the process once it is freed.
        """
        pool = self.device_index, self.cuda_graphs_thread_pool
        try:
            for collect in (gc.collect, bool):  # what an error holds may be garbage
                live = [] if self.current_node is None else self.current_node.path_live_weakrefs()
                if torch._C._cuda_checkPoolLiveAllocations(*pool, {held.data_ptr() for held in live}):
                    return False
                collect()
        except Exception as error:
            _log.warning("the graph pool could not be asked for memory in use: %s", error)
        return True

    def _is_path_open(self) -> bool:
        node = self.current_node
        return not (node is None or self.can_start_new_generation() or node.all_outputs_are_dead())

    def _start_over(self) -> Why | None:
        """Drops all recordings and the graph pool if that is due; returns why this call must not use the pool."""
        pool = self.cuda_graphs_thread_pool
        if self.doubt is not None and self.why_start_over is not self.doubt:
            # With collectives, other ranks may have no doubt.
            if self.reclaiming.is_alike or not self._has_unknown_memory():
                self.doubt = None
            else:
                self.why_start_over, self.starts_over_later = self.doubt, False
        if self.why_start_over is None or (self.starts_over_later and self._is_path_open()):
            return None
        why, self.why_start_over = self.why_start_over, None
        try:
            self.reclaiming.start_over(self, why)
        except Exception as error:  # the GPU is lost, or another thread captures
            _log.warning("CUDA graphs could not start over after an error: %s", error)
        if self.cuda_graphs_thread_pool != pool:
            self.doubt = None
        self.why_start_over = self.doubt  # the next call tries to leave the pool again
        return self.doubt

    def keep_inputs(self, function_id: Any, why: Why) -> None:
        """Records a function again, without using the memory of its inputs: the program holds them sometimes."""
        model = self.ids_to_funcs[function_id].model
        model.keeps_inputs = True
        self.reclaiming.record_again(function_id, why, model.log.newest_recording)

    def _run_beside(self, inputs: list[Any], function_id: Any) -> Any:
        return self.run_ungraphed(inputs, function_id, Reason.BESIDE())

    def run_ungraphed(self, inputs: list[Any], function_id: Any, why: Why) -> Any:
        """Runs a call without touching graphs and their pool; raises RuntimeError if an input was overwritten."""
        check_readable(inputs)
        model = self.ids_to_funcs[function_id].model
        if isinstance(model, FunctionModel):
            model.log.not_graphed(why)
        give_memory(inputs)
        outputs = program_pools.inside(model, inputs)
        if (mode := self.id_to_mode[function_id]) in (_FORWARD, _BACKWARD):  # as upstream's run does
            self.running_forwards_with_pending_backwards = mode == _FORWARD
        return outputs

    def can_start_new_generation(self, *generation: Any) -> bool:
        """Whether a step begins. Since torch 2.14 the argument is the current generation, if it is known."""
        if self._begins_step is not None:
            return self._begins_step
        return bool(super().can_start_new_generation(*generation)) or self._has_endless_path(*generation)

    def _has_endless_path(self, *generation: Any) -> bool:
        node = self.current_node
        if node is None or not self.keeps_outputs or not self.in_new_torch_compile_invocation(*generation):
            return False

        def is_forward(node: Any) -> bool:
            return bool(self.id_to_mode[node.wrapped_function.id] == _FORWARD)

        path = list(node._path_from_root)
        is_long = is_endless(path, is_forward, others=self._ungraphed)
        return is_long and all(keeps_outputs(node.wrapped_function.model) for node in path)

    def take_aside(self, inputs: list[Any]) -> bool:
        """Takes the turn for anything but a graphed call."""
        self.asides += 1  # first: another thread that looks in between must not see a graphed call
        return bool(self.take_turn(inputs))

    def note_ungraphed(self, inputs: list[Any], *, is_forward: bool) -> bool:
        """Notes that an un-graphed forward or backward runs now, if no other call is under way; returns whether it did.

        It is part of a step like a graphed one. A forward that begins a step ends the last step's path: while a
        backward is pending, no later call does.
        """
        with deferred():
            try:
                if has_turn := self.take_aside(inputs):
                    self.note_ungraphed_in_turn(is_forward=is_forward)
                return has_turn
            finally:
                self.end_turn(inputs)

    def note_ungraphed_in_turn(self, *, is_forward: bool) -> None:
        """:meth:`note_ungraphed` of a call that already has the turn."""
        try:
            # A graphed call ends a path that grows at each call: looking for such a path takes longer than this call.
            begins = is_forward and super().can_start_new_generation()
            if begins:
                self._end_path()
            self.update_generation()
            self._ungraphed = self._ungraphed + 1 if is_forward and not begins else 0
        except Exception as error:  # the un-graphed call needs none of this
            self.failed(error)

    def end_step(self, *, if_dead: bool = False) -> bool:
        """Ends the open path as if a step began; returns whether it did: not during a call, nor against ``if_dead``.

        Autograd's graphs that only recordings hold are freed: their nodes would run on the stream that made them.
        """
        inputs: list[Any] = []
        try:  # an interrupt may come anywhere
            if not self.take_aside(inputs):
                return False
            release_unneeded(self.cuda_graphs_thread_pool)
            if if_dead and self.current_node is not None and not self.current_node.all_outputs_are_dead():
                return False
            path = [] if self.current_node is None else list(self.current_node._path_from_root)
            if all(keeps_outputs(node.wrapped_function.model) for node in path):
                self._begins_step = True
                try:
                    self._end_path()
                    return True
                except Exception as error:
                    self.failed(error)
            if self.current_node is not None:
                with idle_device(self.device_index):
                    move_alive(self.current_node)  # outputs that are torch's stay
            return True
        finally:
            if self.has_turn(inputs):
                self._begins_step = None
            self.end_turn(inputs)

    def move_out(self, storage: torch.UntypedStorage) -> None:
        """Moves an output out of the graph pool; does nothing if it is no output.

        Waits a second at most for a call of another thread (``multiprocessing.Queue`` sends tensors from its own one),
        for its capture, or for memory.
        """
        inputs: list[Any] = []
        until = time.monotonic() + 1
        try:  # an interrupt may come anywhere
            while not self.take_aside(inputs):
                if time.monotonic() > until:
                    return
                time.sleep(1e-4)
            while self.current_node is not None:
                try:
                    with idle_device(self.device_index):
                        move_alive(self.current_node, storage)
                    return
                except Exception as error:  # no memory is free, or another thread captures
                    if not passes(error) or time.monotonic() > until:
                        raise
                    self.output_policy.release(self)
                    time.sleep(1e-4)
        finally:
            self.end_turn(inputs)

    def _end_path(self) -> None:
        if self.path_state is _STATE.EXECUTION:
            self.try_end_curr_execution()
        elif self.path_state is _STATE.RECORDING:
            self.try_end_curr_recording(None)
        elif self.path_state is _STATE.WARMUP:
            self.try_end_curr_warmup(None)

    def by_one_answer(self, *calls: Callable[[], None]) -> None:
        """Makes calls that get one answer to whether a step begins, so that no path ends with outputs that stay."""
        before = self._begins_step
        try:  # an interrupt may come anywhere, so this is no context manager
            self._begins_step = self.can_start_new_generation()
            for call in calls:
                call()
        finally:
            self._begins_step = before
