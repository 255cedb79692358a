"""Calls of a manager, one at a time, and what follows from errors in them.

A call has the turn from before it reads the trees until its graph is launched. No call waits for it: calls that come
meanwhile, from a finalizer, a hook or another thread, run un-graphed. Unless the effect of an error of the trees is
known, the next call drops all recordings and the graph pool.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from torch._inductor import cudagraph_trees

from pygraph_trees.reasons import Reason, Why

from ..functions import fast_path
from ..functions.containment import check_readable, contained, described, is_of_program, passes
from ..functions.function import FunctionModel
from ..functions.outputs import give_memory
from ..pools import program_pools
from ..pools.interrupts import deferred
from ..recordings.kept_outputs import note_launch_of
from .steps import Steps

if TYPE_CHECKING:
    from pygraph_trees.outputs.policy import OutputPolicy

    from .reclaiming import Reclaiming

_log = logging.getLogger("pygraph_trees.trees")

_FORWARD, _BACKWARD = cudagraph_trees.CompilationMode.FORWARD, cudagraph_trees.CompilationMode.BACKWARD


class Calls(fast_path.TreeState, Steps):
    reclaiming: Reclaiming
    output_policy: OutputPolicy
    why_start_over: Why | None = None  # why all recordings are dropped at the next call
    _candidates: dict[Any, Any]

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
            if not self.take_turn(new_inputs):
                return self._run_beside(new_inputs, function_id)
            self.order_streams()
            outputs = self._run_contained(new_inputs, function_id)
            note_launch_of(self.current_node, self.last_stream)
            return outputs
        finally:
            self.note_launch()
            self.end_turn(new_inputs)

    def _run_contained(self, inputs: list[Any], function_id: Any) -> Any:
        model, upstream = self.ids_to_funcs[function_id].model, super().run

        def run() -> Any:
            self._start_over()
            with self.output_policy.call(self, function_id, inputs):
                return upstream(inputs, function_id)

        if not isinstance(model, FunctionModel) or model.settings.indirection == "off":  # as upstream
            return run()
        if model.why_ungraphed is not None:
            self._start_over()
            if model.stop is not None:  # not before: it frees what the call that failed used
                model.stop(model.why_ungraphed)
                model.stop = None
            if (mode := self.id_to_mode[function_id]) in (_FORWARD, _BACKWARD):
                self.note_ungraphed_in_turn(is_forward=mode == _FORWARD)
            return self.run_ungraphed(inputs, function_id, model.why_ungraphed)
        return contained(self, run, inputs, function_id)

    def is_in_pool(self, address: int) -> bool:
        return self._pool.holds(address)

    def failed(self, error: Exception, function_id: Any = None) -> None:
        """Drops all recordings and the graph pool at the next call, unless the error passes (:func:`.passes`).

        A function whose call failed warms up again. Raises ``error`` if the program's code raised it.
        """
        if is_of_program(error):
            raise error
        if passes(error):
            return
        _log.info("CUDA graphs start over", exc_info=error)
        self.why_start_over = described(error)
        self._candidates.clear()
        self.warmed_up_functions.discard(function_id)

    def _start_over(self) -> None:
        why, self.why_start_over = self.why_start_over, None
        if why is None:
            return
        try:
            self.reclaiming.start_over(self, why)
        except Exception as error:  # the GPU is lost, or another thread captures
            _log.warning("CUDA graphs could not start over after an error: %s", error)

    def keep_inputs(self, function_id: Any, why: Why) -> None:
        """Records a function again, without using the memory of its inputs: the program holds them sometimes."""
        model = self.ids_to_funcs[function_id].model
        model.keeps_inputs = True
        self.reclaiming.record_again(function_id, why, model.log.newest_recording)

    def _run_beside(self, inputs: list[Any], function_id: Any) -> Any:
        return self.run_ungraphed(inputs, function_id, Reason.BESIDE())

    def run_ungraphed(self, inputs: list[Any], function_id: Any, why: Why) -> Any:
        """Runs a call without touching graphs and their pool.

        Raises RuntimeError if an input is an output that was overwritten.
        """
        check_readable(inputs)
        model = self.ids_to_funcs[function_id].model
        if isinstance(model, FunctionModel):
            model.log.not_graphed(why)
        give_memory(inputs)
        outputs = program_pools.inside(model, inputs)
        if (mode := self.id_to_mode[function_id]) in (_FORWARD, _BACKWARD):  # as upstream's run does
            self.running_forwards_with_pending_backwards = mode == _FORWARD
        return outputs
