"""Checks a new recording against its function, with inputs at other addresses: ``pygraph_verify``.

A :class:`Verification` copies a call's inputs before the function is recorded. :meth:`Verification.check` then runs the
function un-graphed, replays the recording with inputs at other addresses, and compares outputs and mutated inputs bit
by bit. It restores the call's results. A function that is not deterministic is not checked, which the log says.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

import torch

from pygraph_trees.cuda.extent import contents, flat
from pygraph_trees.errors import Reported
from pygraph_trees.indirection.live_input import bytes_at, copy_at, memory_of, span_of
from pygraph_trees.indirection.poison import Poison
from pygraph_trees.report.naming import source_line

from ..recordings.records import name_of_input

if TYPE_CHECKING:
    from ..recordings.replaying import Replayed

_log = logging.getLogger("pygraph_trees.verification")


class VerificationFailed(Reported):
    template = (
        "{function}: a replay with its inputs at other addresses gives another {what} than the function un-graphed "
        "({detail}). At fault: {inputs}. Set pygraph_indirection='off' to go on, and please report this"
    )


class Verification:
    """The inputs of one call of a function that is about to be recorded."""

    def __init__(self, inputs: Sequence[Any], kept: Collection[int]) -> None:
        """``kept``: the inputs that may be held; others are outputs of earlier recordings and must be free to die."""
        if any(isinstance(value, torch.Tensor) and value.is_cpu and value.is_pinned() for value in inputs):
            torch.cuda.synchronize()  # the GPU may still write pinned inputs
        self._before = _copies(inputs)
        self._places = {i: memory_of(value) for i, value in enumerate(inputs) if _is_plain(value)}  # without references
        self._given = {i: inputs[i] for i in kept if i in self._places}

    def check(self, recording: Replayed, outputs: Sequence[Any], name: str) -> None:
        """Raises :class:`VerificationFailed` if the results of a replay differ from the function's."""
        if (live := recording.live) is None:
            return
        given = [value for value in self._before if isinstance(value, torch.Generator)]
        touched = [*self._places.values(), *(memory_of(output) for output in outputs if _is_plain(output))]
        self._poison = poison = Poison(touched, [*torch.cuda.default_generators, torch.default_generator, *given])
        wanted_inputs, wanted = self._ungraphed(recording)
        if poison.has_drawn:
            poison.put_back()
            _log.info("%s: not verified: it draws random numbers", name)
            return
        addresses = live.addresses
        copied_so_far = addresses.extra_copies, addresses.extra_copied_bytes
        try:
            # Inputs on the CPU are staged at each launch, whatever their addresses.
            moved = [item.index for item in live.items if item.index in self._places]
            unfit, wrong = self._replay(recording, outputs, wanted, wanted_inputs, moved)
            if unfit is not None:
                _log.info("%s: not verified: %s", name, unfit)
                return
            if wrong is None:
                return
            again_inputs, again = self._ungraphed(recording)
            if not all(map(_equal, [*again, *again_inputs], [*wanted, *wanted_inputs])):
                _log.info("%s: not verified: it does not give the same twice", name)
                return
            replays = ((i, self._replay(recording, outputs, wanted, wanted_inputs, [i])[1]) for i in moved)
            alone = [index for index, found in replays if found is not None]
            at_fault = ", ".join(_described(recording, i) for i in alone) or "no single input"
            raise VerificationFailed(function=name, what=wrong[0], detail=wrong[1], inputs=at_fault)
        finally:
            addresses.prepare([self._given.get(i, value) for i, value in enumerate(self._before)])  # as at the call
            live.drop()
            addresses.extra_copies, addresses.extra_copied_bytes = copied_so_far
            poison.put_back()

    def _ungraphed(self, recording: Replayed) -> tuple[list[Any], Sequence[Any]]:
        """Runs the function on copies; returns these inputs, as they are afterwards, and the outputs."""
        inputs = _copies(self._before)
        with torch.no_grad():
            outputs = recording.wrapped_function.model.ungraphed(list(inputs))
        return inputs, outputs if isinstance(outputs, (list, tuple)) else (outputs,)

    def _replay(
        self, recording: Replayed, outputs: Any, wanted: Any, wanted_inputs: list[Any], moved: Collection[int]
    ) -> tuple[str | None, tuple[str, str] | None]:
        """Replays with some inputs moved; returns why that is impossible, or which value differs and how."""
        live = recording.live
        assert live is not None
        stands = {item.index for item in live.items}
        given = _copies(self._before)
        for i in moved:
            self._poison.fill(self._places[i], memory_of(self._before[i]), self._before[i].dtype)
        # After the poisoning, because inputs that stay may share memory with moved ones.
        for i, place in self._places.items():
            if i not in moved:
                place.copy_(memory_of(self._before[i]))
                if i in stands:
                    given[i] = self._given.get(i, given[i])
        for i in recording.static_input_idxs:
            given[i] = None
        replayed = list(given)
        if (unfit := live.addresses.prepare(given)) is not None:
            return unfit, None
        live.take(given)
        try:
            live.copy_in()
            recording._copy_inputs_and_remove_from_src(recording.reconstructed_inputs, given)
            recording.replay_for_verification()
            found = [live.output(*live.outputs[i]) if i in live.outputs else o for i, o in enumerate(outputs)]
            for number, (one, other) in enumerate(zip(found, wanted, strict=True)):
                if not _equal(one, other):
                    return None, (f"output {number}", _apart(one, other))
        finally:
            live.finish()
        # Outputs were compared above; un-graphed code does not write to own memory.
        takes = len(replayed) if recording.own is None else recording.own.takes
        for i in sorted(stands & set(range(takes))):
            if not _equal(replayed[i], wanted_inputs[i]):
                return None, (f"content of input {name_of_input(recording, i)}", _apart(replayed[i], wanted_inputs[i]))
        return None, None


def _is_plain(value: Any) -> bool:
    """Whether the value is a tensor whose elements are stored in GPU memory as they are read."""
    is_strided = isinstance(value, torch.Tensor) and value.is_cuda and value.layout is torch.strided
    return is_strided and value.numel() > 0 and not value.is_conj() and not value.is_neg()


def _copies(values: Sequence[Any]) -> list[Any]:
    """Copies of the tensors, with their whole storages if those are small or not much larger than the tensors."""
    blocks: dict[tuple[int, int], torch.Tensor] = {}  # by address and bytes
    return [_copy(value, blocks) for value in values]


def _copy(value: Any, blocks: dict[tuple[int, int], torch.Tensor]) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    if not _is_plain(value):
        if value.layout is not torch.strided or not value.numel():
            return value.detach().clone()
        # Compiled code asserts strides, and ``clone`` keeps only those without gaps and overlaps.
        return flat(value).clone().as_strided(value.shape, value.stride(), 0)
    span = span_of(value)
    key = value.data_ptr() - span.lead, span.nbytes
    if key not in blocks:
        # The same alignment up to 512 bytes, and a size that is a multiple of any element's.
        copy = copy_at(bytes_at(*key, value.device), key[0] % 512)
        blocks[key] = copy.as_strided((-(-span.nbytes // 16) * 16,), (1,))
    elements = blocks[key].view(value.dtype)
    ahead = span.lead // value.element_size()
    return elements.as_strided(value.shape, value.stride(), elements.storage_offset() + ahead)


def _equal(one: Any, other: Any) -> bool:
    """Whether values are equal bit by bit; all NaNs are equal, and so are both zeros."""
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return one is other or (type(one) is type(other) and one == other)
    if one.shape != other.shape or one.dtype != other.dtype or one.device != other.device:
        return False
    return torch.equal(contents(one), contents(other)) or _count_apart(one, other) == 0


def _count_apart(one: torch.Tensor, other: torch.Tensor) -> int:
    mine, its = (contents(t) for t in (one, other))
    dtype = one.dtype
    if (dtype.is_floating_point or dtype.is_complex) and dtype.itemsize > 1:  # smaller ones cannot be compared
        x, y = mine.view(dtype), its.view(dtype)
        return int(((x != y) & ~((x != x) & (y != y))).sum())
    return int((mine != its).view(-1, dtype.itemsize).any(1).sum())


def _apart(one: Any, other: Any) -> str:
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return f"{type(one).__name__} instead of {type(other).__name__}"
    if one.shape != other.shape or one.dtype != other.dtype:
        return f"{one.dtype} of {tuple(one.shape)} instead of {other.dtype} of {tuple(other.shape)}"
    return f"{_count_apart(one, other)} of {one.numel()} elements differ"


def _described(recording: Replayed, index: int) -> str:
    """An input's name, the source line that reads it, and the kernels that hold its address."""
    placeholders = recording.wrapped_function.placeholders
    info = placeholders[index] if index < len(placeholders) else None
    traces = [info.stack_trace, *(user.stack_trace for user in info.users)] if info is not None else []
    line = next((source_line(trace) for trace in traces if trace), None)
    kernels = ", ".join(recording.live.kernels_of(index)) if recording.live is not None else ""
    read, by = f" read at {line}" if line else "", f" by {kernels}" if kernels else ""
    return f"input {name_of_input(recording, index)}{read}{by}"
