"""A recording of a CUDA graph, with a log, whose live inputs are given by address.

:class:`Recording` subclasses the installed ``CUDAGraphNode`` and replaces it. With indirection on, the live inputs are
recorded at placeholder addresses; :mod:`.replaying` has its replays. With indirection off, it does what upstream does.
Upstream's own nodes also count as instances of :class:`Recording`; to tell them apart, compare types.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch._inductor import cudagraph_trees

from pygraph_trees import compat
from pygraph_trees.cuda.driver import driver, usable_driver, why_unusable
from pygraph_trees.cuda.graph_nodes import NodeKind
from pygraph_trees.edges.lanes import LANES
from pygraph_trees.errors import PygraphError
from pygraph_trees.indirection.collectives import Collectives
from pygraph_trees.indirection.inputs import LiveInputs
from pygraph_trees.indirection.route_rule import recorded
from pygraph_trees.indirection.routes import Route
from pygraph_trees.native import binding
from pygraph_trees.placement.staging import observed
from pygraph_trees.reasons import Reason, Why
from pygraph_trees.report.log import RecordingLog
from pygraph_trees.report.naming import BACKWARD, FORWARD
from pygraph_trees.settings import is_upstream_debugged

from ..functions.containment import Stage, UnreadablePool, place_of, progress_of
from ..functions.function import FunctionModel
from ..functions.lanes import Number
from ..functions.outputs import as_they_read, is_on_live_input, makers_of_empty, without_staged
from ..pools import pools
from ..pools.liveness import CountsUpstreams, deaths, release_unneeded
from .attempts import Attempts
from .captured_graph import (
    abandon_capture,
    branches_noted,
    captured_nodes,
    is_cuda,
    kept_graph,
    surroundings,
    try_lanes,
)
from .kept_outputs import kept_indices
from .records import describe, describe_outputs
from .replaying import Replayed, Upstream, native_replay

if TYPE_CHECKING:
    from pygraph_trees.cuda.driver import Driver
    from pygraph_trees.cuda.host_reads import HostRead
    from pygraph_trees.edges.branches import Branching

_IS_RECORDED: Any = cudagraph_trees.CUDAGraphNode._is_cuda_graph_recorded_tensor  # called twice per input


class WouldLoseWrites(PygraphError, RuntimeError):
    """Not expected: such a function is not recorded."""

    template = "recording {recording}: input {index} is written to, and what is written to a copy of it would be lost"


class Recording(Replayed, metaclass=CountsUpstreams):
    UPSTREAM = Upstream
    has_fast_path = False
    outliving: Any = None  # outputs that must be moved if they are alive when the next step begins
    _attempts: Attempts | None = None  # while it is made
    graph: Any
    recording_outputs: Any

    def __init__(
        self, wrapped_function: Any, id: Any, parent: Any, inputs: list[Any], *args: Any, **kwargs: Any
    ) -> None:
        self.log = RecordingLog(id.id, None if parent is None else parent.id.id, counter=binding.new_counter())
        self.own, self._takes = getattr(wrapped_function, "own", None), len(inputs)
        model = wrapped_function.model
        self._gives_addresses = isinstance(model, FunctionModel) and model.settings.indirection != "off"
        mode = model.log.mode if isinstance(model, FunctionModel) else None
        self.has_new_history, self.is_backward = mode == FORWARD, mode == BACKWARD
        self._attempts = attempts = Attempts(wrapped_function, inputs)
        record = functools.partial(super().__init__, wrapped_function, id, parent, inputs, *args, **kwargs)
        held = list(inputs) if getattr(model, "keeps_inputs", False) else []
        attempts.until_one_works(functools.partial(self._make, attempts, record, parent), inputs)
        held.clear()
        self._attempts = None
        self._has_moving = self.live is not None and any(item.managed for item in self.live.items)
        self._prepare_checks()
        is_plain = self._gives_addresses and self.rerecord_if_static_inputs_change
        self.has_fast_path = is_plain and not self._has_moving and not is_upstream_debugged()
        self.log.has_fast_path = self.has_fast_path and binding.extension is not None
        self.log.inputs = tuple(describe(self, self.live, self._copied_indices(), attempts.why_copied))
        self.log.outputs = tuple(describe_outputs(self, self.live, self.own))
        if isinstance(model, FunctionModel):
            routes = set() if self.live is None else {decision.route for decision in self.live.decisions.values()}
            model.copies_nothing = Route.COPY not in routes
            if routes:
                recorded(model, wrapped_function.id, reads_table=Route.TABLE in routes)
        if self.live is not None:
            self.log.sets = self.live.addresses.sets
        self.copies = self.log.copied_bytes > 0
        copies_some = self.copies or (self.live is not None and self.live.copies_some)
        if self.has_fast_path:
            self.native = self._native(in_python=copies_some or compat.is_kernel_free(wrapped_function))

    def _prepare_checks(self) -> None:
        checked: Any = self.tensor_static_input_idxs if compat.lists_static_tensors(self) else self.static_input_idxs
        if not self.rerecord_if_static_inputs_change:
            checked = ()
        self.fixed = [(index, self.static_input_data_ptrs[index]) for index in checked]  # and their addresses
        self.deaths_before = deaths(self, self.expected_dead_indices_before_graph)
        self.deaths_after = deaths(self, self.expected_dead_indices_after_graph)
        self.outliving = deaths(self, kept_indices(self))

    def _native(self, *, in_python: bool) -> Any:
        dropped = [i for i in self.cudagraph_managed_idxs if not self.preserved_aliased_inputs[i]]
        others = [
            made_of if not isinstance(made_of, dict) else NotImplemented if static is None else static
            for made_of, static in zip(self.outputs_metadata, self.static_output_tensors, strict=True)
        ]
        for position in self.empty_outputs:
            others[position] = (self.static_output_tensors[position],)
        return native_replay(self, dropped, others, in_python=in_python)

    def all_outputs_are_dead(self) -> bool:
        return super().all_outputs_are_dead() or (
            release_unneeded(self.cuda_graphs_pool) and super().all_outputs_are_dead()
        )

    def _make(self, attempts: Attempts, record: Callable[[], None], parent: Any) -> None:
        progress = progress_of(attempts.model)
        try:
            if progress is not None:
                progress.stage = Stage.PREPARED
            if parent is not None:
                release_unneeded(parent.cuda_graphs_pool)  # upstream notes which outputs are alive now
            record()
            attempts.launched()
            if progress is not None:
                progress.launched()
            if self.live is not None:  # upstream launches the graph when it makes a node
                if self.live.outputs:
                    self.recording_outputs = list(self.recording_outputs)
                    self.put_given(self.recording_outputs, self.live)
                self.live.finish()
            if progress is not None:
                progress.launched(outputs=self.recording_outputs)
        except BaseException as error:
            self.recording_outputs = None  # they are in the pool, where the next attempt allows no other memory
            if (live := self.live) is not None:
                live.release()
                self.live = None
                attempts.failed(live, error)
            raise

    def _allocate_and_copy_recording_inputs(self, inputs: list[Any]) -> list[Any]:
        attempts = self._attempts
        assert attempts is not None
        self.lent = {index: place_of(inputs[index]) for index in self.cudagraph_managed_idxs}
        api = self._driver_for_addresses()
        copied = self._copied_indices()
        if isinstance(api, Why):
            attempts.why_copied = dict.fromkeys(copied, api)
        elif not compat.is_kernel_free(self.wrapped_function):
            self.live = attempts.choose_live(self, api, inputs)
            for index in self.wrapped_function.mutated_input_idxs:
                if index in copied and isinstance(inputs[index], torch.Tensor) and inputs[index].numel():
                    raise WouldLoseWrites(recording=self.log.number, index=index)
        return super()._allocate_and_copy_recording_inputs(inputs)

    def _copy_inputs_and_remove_from_src(self, dsts: list[Any], srcs: list[Any]) -> None:
        copied = self._copied_indices()
        for index in copied if self._gives_addresses else ():  # otherwise inputs are copied as upstream
            if isinstance(srcs[index], torch.Tensor) and srcs[index].is_neg():
                srcs[index] = as_they_read(srcs[index])  # torch 2.15 copies the memory of a negated view as it is
        # A recording made in inference mode has tensors that can be written to in that mode only.
        with torch.inference_mode() if copied else nullcontext():
            super()._copy_inputs_and_remove_from_src(dsts, srcs)

    def _is_cuda_graph_recorded_tensor(self, t: torch.Tensor) -> Any:
        """Upstream's answer, except that managed inputs that move are not recorded tensors while this one is made."""
        if (attempts := self._attempts) is not None:
            is_view = self._gives_addresses and (t.is_neg() or t.is_conj())
            if is_view or any(t is moving for moving in attempts.moving.values()):
                return False
        return _IS_RECORDED(self, t)

    def _driver_for_addresses(self) -> Driver | Why:
        """The driver that gives the graph addresses, or why its inputs are copied."""
        model = self.wrapped_function.model
        if not isinstance(model, FunctionModel):
            return Reason.UNPATCHED()
        if model.settings.indirection == "off":
            return Reason.INDIRECTION_OFF()
        # This thread's manager does not tell: another manager than the one that added a function may record it.
        if self.cuda_graphs_pool not in pools.OWNED:
            # Upstream's manager does not tell when its graph pool grows.
            return Reason.UNPATCHED_MANAGER()
        return usable_driver() or Reason.NO_DRIVER(error=why_unusable() or "there was no driver to be used")

    def _record(self, model: Callable[[list[Any]], Any], inputs: list[Any]) -> Any:
        live = self.live if self.graph is not None else None
        flag, lanes = self._branches_flag()
        if live is not None or lanes:
            self.graph = kept_graph(inputs)

        def on_placeholder_tensors(model_inputs: list[Any]) -> Any:
            for item in () if live is None else live.items:
                model_inputs[item.index] = item.placeholder_tensor
            block, copy = (None, None) if live is None else live.staged_copies
            progress = progress_of(self.wrapped_function.model)
            with (
                nullcontext() if live is None else live.captured(),
                nullcontext() if progress is None else progress.capturing(),
                observed(block, copy) as staged,
                nullcontext() if live is None else self._collectives_noted(live),
                branches_noted(self, model_inputs, flag, lanes) as branching,
            ):
                outputs = staged.with_own_memory(as_they_read(model(model_inputs)))
            branchings.extend(filter(None, [branching]))
            reads.extend(staged.reads)
            copied.extend(staged.copied)
            if live is None:
                self._count_nodes(captured_nodes())
            elif live.has_staged:
                outputs = without_staged(outputs, live)
            return outputs

        reads: list[tuple[int, HostRead]] = []
        copied: list[int] = []
        branchings: list[Branching] = []  # at most one
        stream = torch.cuda.current_stream(self.device)

        def with_branches(graph: Any) -> Any:
            for branching in branchings if flag == "always" else ():
                branching.replace(int(graph.raw_cuda_graph()))
            return graph

        try:
            outputs = super()._record(on_placeholder_tensors, inputs)
        except BaseException as error:
            function, manager = self.wrapped_function, pools.OWNED.get(self.cuda_graphs_pool)
            if lanes and function.model.settings.branches == "auto" and isinstance(error, Exception):
                why = function.model.lanes.give_up(function.id, Reason.NO_CHAIN(why=error))
                if manager is not None:  # lanes may need more memory than there is
                    manager.give_lanes_back(why)
            if self.graph is not None:
                abandon_capture(self, error, stream)
            raise
        if self.graph is not None:
            # Torch sets the offset of random numbers on the capture's stream, and for a replay on the current stream.
            torch.cuda.current_stream(self.device).wait_stream(self.stream)
        if live is not None:
            around = functools.partial(surroundings, self, outputs, live)
            with torch.cuda.device(self.device):
                live.set_up(self.graph, reads, copied, around, with_branches)
            self._count_nodes(live.kinds)
        elif lanes:
            with torch.cuda.device(self.device):
                with_branches(self.graph).instantiate()
        for branching in branchings:
            if flag == "forecast" and self.log.why_no_branches is None:
                count, why = branching.forecast.choose()
                function = self.wrapped_function
                function.model.lanes.decide(function.id, Number(count, why, count == 0), str(why))
                self.log.why_no_branches = why
            elif flag == "auto":
                try_lanes(self, branching)
        return outputs

    def _collectives_noted(self, live: LiveInputs) -> AbstractContextManager[Any]:
        """Wraps the capture of a function that calls collectives."""
        model, api = self.wrapped_function.model, driver()
        if api is not None and isinstance(model, FunctionModel) and model.log.has_collective:
            live.collectives = Collectives(api, torch.cuda.current_stream().cuda_stream)
            return live.collectives
        return nullcontext()

    def _branches_flag(self) -> tuple[str, int]:
        """``pygraph_branches`` for this recording, and the number of lanes to capture on.

        "auto" is "forecast" or "off" if there are none, and "always" if no trial follows.
        """
        model = self.wrapped_function.model
        if self.graph is None or not isinstance(model, FunctionModel) or compat.is_kernel_free(self.wrapped_function):
            return "off", 0
        flag = model.settings.branches
        number = model.lanes.numbers.get(self.wrapped_function.id) if flag == "auto" else None
        manager = pools.OWNED.get(self.cuda_graphs_pool)
        why_full = None if manager is None else manager.reclaiming.lanes.why_full
        if flag == "auto" and why_full is not None and (number is None or not number.is_final):
            self.log.why_no_branches = model.lanes.give_up(self.wrapped_function.id, why_full)
            return "off", 0
        if number is None:
            return "forecast" if flag == "auto" else flag, max(LANES) if flag == "always" else 0
        self.log.why_no_branches = None if number.count else number.why
        if number.count and manager is not None:
            if not number.is_final and manager.reclaiming.awaits(self.wrapped_function.id):
                self.log.why_no_branches = number.why  # elsewhere in the same step; it is recorded on lanes later
                return "off", 0
            pool = manager.pool.nbytes()
            if (free := pools.free_bytes(manager.device_index, pool)) < pool // 2:
                self.log.why_no_branches = Reason.LANES_NO_ROOM(nbytes=free)
                return "off", 0
        return "off" if not number.count else "always" if number.is_final else "auto", number.count

    def _add_first_outputs(self, outputs: Any, static_input_persistent_storage_ptrs: dict[int, Any]) -> None:
        live = self.live
        # Upstream neither frees nor checks outputs on a persistent input. It only checks that the input is alive, and
        # placeholder tensors are.
        placeholders = {} if live is None else dict.fromkeys(live.storages, lambda: True)
        try:
            super()._add_first_outputs(outputs, static_input_persistent_storage_ptrs | placeholders)
        except RuntimeError as error:
            # Upstream sets the first, asks the allocator for the pool's state, and sets the second.
            if self.recorded_liveness_after_graph and self.checkpointed_caching_state is None:
                raise UnreadablePool(error=error) from error
            raise
        for position, output in enumerate(outputs):
            if live is not None and is_cuda(output) and is_on_live_input(live, position, output):
                self.static_output_tensors[position] = torch.empty(0)  # the output is rebuilt from each call's input
        if self._gives_addresses:  # upstream returns one tensor again and again, whatever the program did to it
            self.empty_outputs = makers_of_empty(self.static_output_tensors, () if live is None else live.outputs)

    def _count_nodes(self, counts: Counter[NodeKind]) -> None:
        if counts:
            self.log.kernels = counts[NodeKind.KERNEL]
            self.log.other_nodes = counts.total() - counts[NodeKind.KERNEL] - counts[NodeKind.EMPTY]
