"""Replays of a recording: whether it fits a call, the launch, and its outputs.

:class:`Replayed` is the part of a recording that each call on the slow path uses. Before a replay, the graph is given
the call's addresses; if that fails, the recording is passed over. Outputs on live inputs, and those with own memory,
are made for each call. After an error in upstream's code, outputs are copies of what the graph has written.
:func:`native_replay` gives C++ a recording's part of a fast replay.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Mapping, Sequence
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
from ..pools.liveness import Deaths
from .cached_outputs import CachedOutputs

if TYPE_CHECKING:
    from pygraph_trees.indirection.inputs import LiveInputs
    from pygraph_trees.outputs.own_memory import OwnMemory
    from pygraph_trees.report.log import RecordingLog

_MISMATCH = cudagraph_trees.CheckInvariantStatus.StaticInputIdxMismatch
_FITS = cudagraph_trees.CheckInvariantStatus.SUCCESS, lambda: "CheckInvariantStatus.SUCCESS"
_ALIVE_BEFORE = (
    cudagraph_trees.CheckInvariantStatus.ExpectedDeadIndicesBeforeGraphMismatch,
    lambda: "CheckInvariantStatus.ExpectedDeadIndicesBeforeGraphMismatch",
)


class Replayed(CachedOutputs):
    log: RecordingLog
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
        live = self.live
        if live is not None:
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
        """Replays the graph, which has the inputs' addresses, and returns the outputs; consumes the inputs.

        For a fast replay whose inputs are copied or whose outputs are made from them.
        """
        manager = pools.owner_of(self.cuda_graphs_pool)
        if manager is None:
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
            live.take_returned(inputs)
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
        live = self.live
        if live is None:
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
        """Copies of the outputs that the last launch has written, except those on live inputs.

        They are made without upstream's code.
        """
        outputs: list[Any] = []
        for made_of, static in zip(self.outputs_metadata, self.static_output_tensors, strict=True):
            if static is not None or not isinstance(made_of, dict):
                outputs.append(made_of if static is None else static)
            else:
                outputs.append(owned(in_place(made_of)))
        return outputs

    def own_outputs(self) -> Any:
        """All outputs except those on live inputs; after an error, copies of them. C++ calls this after a launch."""
        try:
            return super().own_outputs()
        except Exception as error:
            manager = pools.owner_of(self.cuda_graphs_pool)
            if manager is None or not self._gives_addresses:
                raise
            note_failure(self.wrapped_function.model, error)
            manager.failed(error, self.wrapped_function.id)
            return self.copied_outputs()

    def reconstruct_outputs(self) -> Any:
        outputs = self.own_outputs()
        live = self.live
        if live is not None:
            self._put_given(outputs, live)
        return outputs

    def _put_given(self, outputs: Any, live: LiveInputs) -> None:
        """Puts the outputs that are made for each call in their places: inputs, views of them, and own memory."""
        for position, (index, view) in live.outputs.items():
            of = live if self.own is None or index < self.own.takes else self.own
            outputs[position] = of.output(index, view)

    def _stays(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is an output that was alive throughout this recording, so that its memory is not reused."""
        found = self._is_alias_of_live_recorded_tensor(tensor)
        # The last level of the path holds this recording's own outputs, whose memory it does write.
        return found is not None and found[0] < len(self.path_weakrefs) - 1 and found in self.live_indices_after_graph


def native_replay(
    recording: Replayed, managed: Sequence[int], others: Sequence[Any], *, in_python: bool = False
) -> Any:
    """The C++ part of a recording that has a fast path; None without C++.

    Args:
        managed: the indices of the inputs that are released.
        others: by output, the value that is not cached, or ``NotImplemented`` if there is no such value. A tuple with
            a tensor without elements stands for a new one like it at each call.
        in_python: whether ``recording.replay`` launches the graph.
    """
    if binding.extension is None:
        return None
    live, kind = recording.live, type(recording)
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
        returned=() if live is None else _returned(live, recording.own),
        before=_to_ask(recording.deaths_before),
        after=_to_ask(recording.deaths_after),
        outliving=_to_ask(recording.outliving),
        own=None if recording.own is None else recording.own.native,
        borrow=kind.borrowed,
        make=kind.own_outputs,
        run=kind.replay,
        in_python=in_python or (live is not None and _changes_dtype(live, recording.own)),
        python_checks=fast_path.CHECKS_LATE,
        has_new_history=recording.has_new_history,
        is_backward=recording.is_backward,
    )


def _returned(live: LiveInputs, own: OwnMemory | None) -> tuple[tuple[Any, ...], ...]:
    """The input of each output that is made for each call, the output, its block of own memory, and its view of it."""
    takes = sys.maxsize if own is None else own.takes
    return tuple(
        (index, position, None if index < takes else index - takes, view)
        for position, (index, view) in live.outputs.items()
    )


def _changes_dtype(live: LiveInputs, own: OwnMemory | None) -> bool:
    """Whether an output is a view of an input, not of own memory, with another dtype."""
    dtypes = {item.index: item.placeholder_tensor.dtype for item in live.items}
    return any(
        view is not None and view[-1] != dtypes[index]
        for index, view in live.outputs.values()
        if own is None or index < own.takes
    )


def _to_ask(deaths: Deaths | None) -> tuple[Any, Any] | None:
    return None if deaths is None else (deaths.groups, deaths.ask)
