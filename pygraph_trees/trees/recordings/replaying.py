"""Replays of a recording: whether it fits a call, the launch, and its outputs.

:class:`Replayed` is the part of a recording that each call on the slow path uses. If the graph cannot be given the
call's addresses, the recording is passed over. Outputs on live inputs, and those with own memory, are made for each
call. Others are cached, and returned again once nobody holds them, unless the program changed one. Gradients are new
tensors, because a hook may keep one that autograd takes over; C++ returns cached ones if only autograd uses them.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch._inductor import cudagraph_trees

from pygraph_trees import compat
from pygraph_trees.native import binding
from pygraph_trees.reasons import Reason, Why

from ..functions import fast_path
from ..functions.containment import HeldForTooLong, contained, in_place, note_failure, owned, progress_of
from ..pools import pools
from ..pools.liveness import Deaths, OlderOutputs, register

if TYPE_CHECKING:
    from pygraph_trees.indirection.inputs import LiveInputs
    from pygraph_trees.outputs.own_memory import OwnMemory
    from pygraph_trees.report.log import RecordingLog

Upstream: type = cudagraph_trees.CUDAGraphNode
_MISMATCH = cudagraph_trees.CheckInvariantStatus.StaticInputIdxMismatch
_FITS = cudagraph_trees.CheckInvariantStatus.SUCCESS, lambda: "CheckInvariantStatus.SUCCESS"
_ALIVE_BEFORE = (
    cudagraph_trees.CheckInvariantStatus.ExpectedDeadIndicesBeforeGraphMismatch,
    lambda: "CheckInvariantStatus.ExpectedDeadIndicesBeforeGraphMismatch",
)


class Replayed(Upstream):
    log: RecordingLog
    native: Any = None  # its part of a fast replay in C++
    _gives_addresses = False  # whether inputs may be given by address
    cached_addresses: Sequence[int] = ()  # of each cached output when it was made; 0 if it is not cached
    has_new_history = False  # whether autograd gives the outputs a new history at each call
    is_backward = False  # whether the outputs are gradients
    empty_outputs: Mapping[int, Callable[[], torch.Tensor]] = MappingProxyType({})  # make outputs without memory
    older_outputs: Any = ()  # references to outputs that newer ones have replaced
    fixed: Sequence[tuple[int, int]]  # index and address of each static input
    deaths_before: Deaths | None
    deaths_after: Deaths | None
    unfit: Why | None = None  # why the last ``check_invariants`` could not give it the inputs of a call
    _has_moving = False  # whether a managed input is given by address
    live: LiveInputs | None = None  # those that were recorded at placeholder addresses
    _takes: int  # how many inputs a call has without own memory
    copies = False  # whether a replay copies an input
    own: OwnMemory | None = None  # own memory of its outputs; the blocks are its last inputs
    lent: Mapping[int, dict[str, Any]] = MappingProxyType({})  # upstream's metadata of managed inputs

    def check_invariants(self, inputs: list[Any]) -> Any:
        self.unfit = None
        if not (len(inputs) == self._takes if self.own is None else self.own.is_given(inputs)):
            self.unfit = Reason.OTHER_OUTPUTS()
            return _MISMATCH, lambda: self.unfit
        # Giving a graph addresses takes time, so the other checks come first.
        if any(inputs[index].data_ptr() != address for index, address in self.fixed):
            return super().check_invariants(inputs)  # tells which input moved
        managed = self.cudagraph_managed_idxs if self.is_backward and self._gives_addresses else ()
        if any(inputs[index].is_neg() or inputs[index].is_conj() for index in managed):
            self.unfit = Reason.IS_VIEW()  # a tangent in the graph pool
            return _MISMATCH, lambda: self.unfit
        if self.deaths_before is not None and not self.deaths_before.ask():
            return _ALIVE_BEFORE
        if (live := self.live) is not None:
            why = self._why_not_alive(live, inputs) if self._has_moving else None
            if why is None:
                why = live.addresses.prepare(inputs, stays=self._stays)
            if why is not None:
                self.unfit = why
                self.wrapped_function.model.refused.update(live.addresses.refused)
                return _MISMATCH, lambda: why
        # Upstream's check only compares addresses of static inputs if there are no managed inputs and no deaths.
        if self.rerecord_if_static_inputs_change and not (
            self.cudagraph_managed_idxs or self.deaths_before or self.deaths_after
        ):
            return _FITS
        if (progress := progress_of(self.wrapped_function.model)) is not None:
            progress.hold(self.cudagraph_managed_idxs)
        try:
            status, logger = super().check_invariants(inputs)
        except RuntimeError:
            if self._gives_addresses:  # otherwise the error is torch's
                self.check_what_died()
            raise
        if status != cudagraph_trees.CheckInvariantStatus.SUCCESS and live is not None:
            live.drop()
        return status, logger

    def _why_not_alive(self, live: LiveInputs, inputs: list[Any]) -> Why | None:
        """Why the recording must not be replayed: upstream raises if an output that died while recording is alive."""
        for item in live.items:
            if item.managed and not inputs[item.index]._is_zerotensor():
                found = self._is_alias_of_live_recorded_tensor(inputs[item.index])
                if found is not None and found in self.expected_dead_indices_after_graph:
                    return Reason.EXPECTED_GONE()
        return None

    def check_what_died(self) -> None:
        """Raises :class:`HeldForTooLong` if an input that died while recording is still held."""
        if self.deaths_after is not None and not self.deaths_after.ask():
            if self.live is not None:
                self.live.drop()
            raise HeldForTooLong(function=self.wrapped_function.model.log.name)

    def replay(self, inputs: list[Any]) -> Any:
        """For a fast replay whose inputs are copied or whose outputs are made from them: launches the graph, which has
        the inputs' addresses, returns the outputs, and consumes the inputs.
        """
        if (manager := pools.OWNED.get(self.cuda_graphs_pool)) is None:
            return self._replay(inputs)
        return contained(manager, lambda: self._replay(inputs), inputs, self.wrapped_function.id)

    def borrowed(self, index: int) -> torch.Tensor:
        """A tensor with the memory of a managed input, which the call has released."""
        return in_place(self.lent[index])

    def _replay(self, inputs: list[Any]) -> Any:
        if (progress := progress_of(self.wrapped_function.model)) is not None:
            progress.released(self.lent)  # by C++
        live = self.live
        if self.copies or (live is not None and live.is_copied):
            return self.run(inputs)
        if fast_path.CHECKS_LATE:
            self.check_what_died()
        if live is not None:
            self._hold()
            live.take(inputs)
        try:
            self.run_graph()
            outputs = self.reconstruct_outputs()
        finally:
            if live is not None:
                live.finish()
        inputs.clear()
        return outputs

    def _copied_indices(self) -> list[int]:
        """The indices of the inputs that upstream copies; changing the list changes the inputs that upstream copies."""
        return self.input_copy_idxs if compat.lists_copied_inputs(self) else self.non_static_input_idx

    def _hold(self) -> None:
        """Holds the inputs that this recording takes or copies, for a call that ends before the launch."""
        if (progress := progress_of(self.wrapped_function.model)) is not None:
            items = () if self.live is None else self.live.items
            progress.hold([*self._copied_indices(), *(item.index for item in items)])

    def run(self, new_inputs: list[Any]) -> Any:
        self._hold()
        if (live := self.live) is None:
            return super().run(new_inputs)
        addresses = live.addresses
        self.log.extra_copies, self.log.extra_copied_bytes = addresses.extra_copies, addresses.extra_copied_bytes
        live.take(new_inputs, only_ours=fast_path.CHECKS_LATE)
        try:
            live.copy_in()
        except BaseException:
            live.drop()  # no input may be copied back
            raise
        try:
            return super().run(new_inputs)
        finally:
            live.finish()

    def replay_for_verification(self) -> None:
        """Only launches the graph; no call is counted."""
        super().run_graph()

    def run_graph(self) -> None:
        self.log.counter.value += 1
        super().run_graph()
        if (progress := progress_of(self.wrapped_function.model)) is not None:
            progress.launched(None if self.live is not None and self.live.outputs else self)

    def copied_outputs(self) -> list[Any]:
        """Copies of the outputs that the last launch has written, except those on live inputs, without upstream."""
        return [
            static if static is not None else owned(in_place(made_of)) if isinstance(made_of, dict) else made_of
            for made_of, static in zip(self.outputs_metadata, self.static_output_tensors, strict=True)
        ]

    def own_outputs(self) -> Any:
        """All outputs except those on live inputs; after an error, copies of them. C++ calls this after a launch."""
        try:
            return self._cached_or_new()
        except Exception as error:
            if (manager := pools.OWNED.get(self.cuda_graphs_pool)) is None or not self._gives_addresses:
                raise
            note_failure(self.wrapped_function.model, error)
            manager.failed(error, self.wrapped_function.id)
            return self.copied_outputs()

    def _cached_or_new(self) -> Any:
        # The program may have changed one; only C++ looks at them.
        if self._gives_addresses and (self.native is None or not self.native.is_untouched()):
            self.remove_node_cached_tensors()
        for position, make in self.empty_outputs.items():
            self.static_output_tensors[position] = make()
        outputs = super().reconstruct_outputs()
        if self._gives_addresses and self.is_backward:
            for position, cached in enumerate(self.cached_tensor_outputs):
                if cached is not None:
                    outputs[position] = cached.detach()
        return outputs

    def reconstruct_outputs(self) -> Any:
        outputs = self.own_outputs()
        if self.live is not None:
            self.put_given(outputs, self.live)
        return outputs

    def put_given(self, outputs: Any, live: LiveInputs) -> None:
        """Puts the outputs that are made for each call in their places: inputs, views of them, and own memory."""
        for position, (index, view) in live.outputs.items():
            of = live if self.own is None or index < self.own.takes else self.own
            outputs[position] = of.output(index, view)

    def _stays(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is an output that was alive throughout this recording, so that its memory is not reused."""
        found = self._is_alias_of_live_recorded_tensor(tensor)
        # The last level of the path holds this recording's own outputs, whose memory it does write.
        return found is not None and found[0] < len(self.path_weakrefs) - 1 and found in self.live_indices_after_graph

    def create_storage(self, metadata: dict[str, Any]) -> Any:
        storage = super().create_storage(metadata)
        if self._gives_addresses and binding.extension is not None:
            binding.extension.make_resizable(storage)
        return storage

    def _initialize_cached_tensors(self) -> None:
        self.older_outputs = self.older_outputs or OlderOutputs()
        self.older_outputs.add(self.outputs_weakrefs)
        try:
            super()._initialize_cached_tensors()
            if self._gives_addresses and not self.is_backward:
                for output in self.cached_tensor_outputs:  # they are no gradients that autograd may take over
                    if output is not None:
                        torch._C._remove_cached_tensor(output)
            self.cached_addresses = [
                0 if output is None else output.data_ptr() for output in self.cached_tensor_outputs
            ]
            if self.native is not None:
                self.native.note_cached()
            self._registered = register(self)
        except BaseException:  # an interrupt may come anywhere, and a part of them must not stay
            self.remove_node_cached_tensors()
            raise

    def remove_node_cached_tensors(self) -> None:
        held = list(self.cached_tensor_outputs)  # freeing one may run code that asks which outputs are alive
        super().remove_node_cached_tensors()
        held.clear()


def native_replay(
    recording: Replayed,
    managed: Sequence[int],  # the indices of the inputs that are released
    # By output, the value that is not cached, or ``NotImplemented`` if there is no such value. A tuple with a tensor
    # without elements stands for a new one like it at each call.
    others: Sequence[Any],
    *,
    in_python: bool = False,  # whether ``recording.replay`` launches the graph
) -> Any:
    """The C++ part of a recording that has a fast path; None without C++."""
    if binding.extension is None:
        return None
    live, kind = recording.live, type(recording)
    takes = sys.maxsize if recording.own is None else recording.own.takes
    made = [] if live is None else [(index, position, view) for position, (index, view) in live.outputs.items()]
    dtypes = {} if live is None else {item.index: item.placeholder_tensor.dtype for item in live.items}
    # A view of an input, not of own memory, with another dtype.
    changes_dtype = any(view is not None and index < takes and view[-1] != dtypes[index] for index, _, view in made)
    return binding.extension.Replay(
        recording=weakref.ref(recording),
        prepare=None if live is None else live.addresses.prepare_fast,
        addresses=None if live is None else live.addresses.native,
        replays=recording.log.counter,
        graph=recording.graph,
        cached=recording.cached_tensor_outputs,
        others=list(others),
        places=recording.fixed,
        patched=[] if live is None else [item.index for item in live.patched],
        managed=managed,
        # The input, the output, its block of own memory, and its view of that.
        returned=tuple((i, position, None if i < takes else i - takes, view) for i, position, view in made),
        before=_to_ask(recording.deaths_before),
        after=_to_ask(recording.deaths_after),
        outliving=_to_ask(recording.outliving),
        own=None if recording.own is None else recording.own.native,
        borrow=kind.borrowed,
        make=kind.own_outputs,
        run=kind.replay,
        in_python=in_python or changes_dtype,
        python_checks=fast_path.CHECKS_LATE,
        has_new_history=recording.has_new_history,
        is_backward=recording.is_backward,
    )


def _to_ask(deaths: Deaths | None) -> tuple[Any, Any] | None:
    return None if deaths is None else (deaths.groups, deaths.ask)
