"""Upstream's tree manager, with a log of what it records and why.

:class:`Manager` subclasses the installed ``CUDAGraphTreeManager`` and stands in its place. It decides as upstream
does; its methods act where upstream warms up, records or gives up on a function, never on a replay.

Functions that were added while the patches were off have no log and are served all the same.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch
from torch._inductor import cudagraph_trees

from .function import FunctionModel
from .rerecord import why_recorded

if TYPE_CHECKING:
    from pygraph_trees.coverage.log import FunctionLog

Upstream: type = cudagraph_trees.CUDAGraphTreeManager


class Manager(Upstream):
    """The recordings of one device (and, since 2.13, of one thread)."""

    def _log_of(self, function_id: Any) -> FunctionLog | None:
        model = self.ids_to_funcs[function_id].model
        return model.log if isinstance(model, FunctionModel) else None

    def record_function(self, new_inputs: list[Any], function_id: Any) -> Any:
        function = self._log_of(function_id)
        if function is None:
            return super().record_function(new_inputs, function_id)
        reason = why_recorded(self, new_inputs, function_id, function)
        before = self._pool_nbytes()
        start = time.perf_counter()
        outputs = super().record_function(new_inputs, function_id)
        record_s = time.perf_counter() - start
        log = getattr(self.current_node, "log", None)
        if log is None:  # the patches went off, and upstream's own recording was made
            return outputs
        log.record_s = record_s
        log.reason = reason
        log.pool_bytes = self._pool_nbytes() - before
        function.recorded(log)
        return outputs

    def run_eager(self, new_inputs: list[Any], function_id: Any) -> Any:
        function = self._log_of(function_id)
        if function is None:
            return super().run_eager(new_inputs, function_id)
        function.warmups += 1
        before = self._pool_nbytes()
        outputs = super().run_eager(new_inputs, function_id)
        function.warmup_pool_bytes += self._pool_nbytes() - before
        return outputs

    def _pool_nbytes(self) -> int:
        """What the graph pool has reserved, from a snapshot of this pool alone."""
        segments = torch.cuda.memory_snapshot(self.cuda_graphs_thread_pool, include_traces=False)
        return sum(segment["total_size"] for segment in segments)

    def _update_non_cudagraph_managed_mutation(self, function_id: Any, inputs: list[Any]) -> None:
        super()._update_non_cudagraph_managed_mutation(function_id, inputs)
        function = self._log_of(function_id)
        if function is not None and self._is_skipped(function_id):
            function.not_graphed("mutates inputs that are neither static nor managed")

    def _is_skipped(self, function_id: Any) -> bool:
        """Whether upstream runs the function un-graphed at the current position; the table was renamed in 2.15."""
        renamed = hasattr(self, "skip_cudagraph")
        table = self.skip_cudagraph if renamed else self.non_cudagraph_managed_mutation_hint
        return bool(table[self._get_node_id()].get(function_id))
