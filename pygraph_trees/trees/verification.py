"""Checks a new recording against the function that it was made of, with inputs at other addresses: ``pygraph_verify``.

:meth:`Verification.begin` copies what a call gives to a function before it is recorded. Behind the recording,
:meth:`Verification.check` runs the function un-graphed on copies, then the recording once more, given copies at other
addresses while the tensors of the call are poisoned, and compares outputs and written inputs bit by bit. All that the
call has left behind is put back. Where they differ the inputs are moved one at a time, to name the one at fault.

A function that draws random numbers draws others the second time: it is not checked, which the log says.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch._inductor.utils import clone_preserve_strides

from pygraph_trees.coverage.partitions import source_line
from pygraph_trees.exc import PygraphError
from pygraph_trees.extent import flat

if TYPE_CHECKING:
    from .recording import Recording

_log = logging.getLogger("pygraph_trees.verification")


class VerificationFailed(PygraphError):
    template = (
        "{function}: a replay with its inputs at other addresses gives another {what} than the function un-graphed "
        "({detail}). At fault: {inputs}. Set pygraph_indirection='off' to go on, and please report this"
    )


class Verification:
    """What one call gives to a function that is about to be recorded."""

    def __init__(self, inputs: Sequence[Any], kept: Collection[int]) -> None:
        """``kept``: the inputs that may be held; others are outputs of earlier recordings and must be free to die."""
        self._before = [_copy(value) for value in inputs]
        self._given = {i: inputs[i] for i in kept if isinstance(inputs[i], torch.Tensor)}

    def check(self, recording: Recording, outputs: Sequence[Any], name: str) -> None:
        """Raises :class:`VerificationFailed` where a replay does something else than the function."""
        live = recording.live
        if live is None:
            return
        model = recording.wrapped_function.model
        wanted_inputs = [_copy(value) for value in self._before]
        drawn = _random_offsets()
        wanted = model.model(list(wanted_inputs))
        if drawn != _random_offsets():
            _set_random_offsets(drawn)
            _log.info("%s: not verified: it draws random numbers", name)
            return
        left = {i: _copy(t) for i, t in self._given.items()}
        left_outputs = [_copy(o) for o in outputs]
        try:
            wrong = self._wrong(recording, outputs, wanted, wanted_inputs, {i.index for i in live.items})
            if wrong is not None:
                alone = [
                    item.index
                    for item in live.items
                    if self._wrong(recording, outputs, wanted, wanted_inputs, {item.index}) is not None
                ]
                inputs = ", ".join(_place(recording, i) for i in alone) or "no single input"
                raise VerificationFailed(function=name, what=wrong[0], detail=wrong[1], inputs=inputs)
        finally:
            for i, tensor in self._given.items():
                _restore(tensor, left[i])
            for output, value in zip(outputs, left_outputs, strict=True):
                _restore(output, value)

    def _wrong(
        self,
        recording: Recording,
        outputs: Sequence[Any],
        wanted: Sequence[Any],
        wanted_inputs: Sequence[Any],
        moved: Collection[int],
    ) -> tuple[str, str] | None:
        """What a replay with some inputs moved gets wrong, and how."""
        live = recording.live
        assert live is not None
        stands = {item.index for item in live.items}
        replayed: list[Any] = [None] * len(self._before)
        for i, tensor in self._given.items():
            _restore(tensor, self._before[i])
            if i in stands:
                replayed[i] = _copy(tensor) if i in moved else tensor
            if i in moved:
                _poison(tensor)
        unfit = live.prepare(replayed)
        if unfit is not None:
            return "answer", unfit
        given = list(replayed)
        live.take(given)
        live.copy_in()
        recording.replay_for_verification()
        found = [live.output(*live.outputs[i]) if i in live.outputs else o for i, o in enumerate(outputs)]
        try:
            for number, (one, other) in enumerate(zip(found, wanted, strict=True)):
                if not _equal(one, other):
                    return f"output {number}", _apart(one, other)
        finally:
            live.finish()
        for i in sorted(stands):
            if not _equal(replayed[i], wanted_inputs[i]):
                return f"content of input {_name(recording, i)}", _apart(replayed[i], wanted_inputs[i])
        return None


def _copy(value: Any) -> Any:
    return clone_preserve_strides(value.detach()) if isinstance(value, torch.Tensor) and value.numel() else value


def _restore(target: Any, value: Any) -> None:
    if isinstance(target, torch.Tensor) and target is not value and target.numel():
        with torch.no_grad():
            flat(target).copy_(flat(value))


def _poison(tensor: torch.Tensor) -> None:
    with torch.no_grad():
        flat(tensor).fill_(float("nan") if tensor.is_floating_point() or tensor.is_complex() else 0)


def _equal(one: Any, other: Any) -> bool:
    """Whether values are equal bit by bit, NaNs of any payload counting as one."""
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return one is other or one == other
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return bool(torch.equal(one, other)) or bool(torch.isclose(one, other, rtol=0, atol=0, equal_nan=True).all())


def _apart(one: Any, other: Any) -> str:
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor) or one.shape != other.shape:
        return f"{type(one).__name__} instead of {type(other).__name__}"
    count = int((~torch.isclose(one, other, rtol=0, atol=0, equal_nan=True)).sum())
    return f"{count} of {one.numel()} elements differ"


def _place(recording: Recording, index: int) -> str:
    """An input with where it is read and the kernels that hold its address."""
    placeholders = recording.wrapped_function.placeholders
    info = placeholders[index] if index < len(placeholders) else None
    traces = [info.stack_trace, *(user.stack_trace for user in info.users)] if info is not None else []
    line = next((source_line(trace) for trace in traces if trace), None)
    kernels = ", ".join(recording.live.kernels_of(index)) if recording.live is not None else ""
    parts = [f"input {_name(recording, index)}", f"read at {line}" if line else "", f"by {kernels}" if kernels else ""]
    return " ".join(part for part in parts if part)


def _name(recording: Recording, index: int) -> str:
    placeholders = recording.wrapped_function.placeholders
    return str(placeholders[index].name) if index < len(placeholders) else str(index)


def _generators() -> Iterator[Any]:
    yield from torch.cuda.default_generators


def _random_offsets() -> list[int]:
    return [generator.get_offset() for generator in _generators()]


def _set_random_offsets(offsets: Sequence[int]) -> None:
    for generator, offset in zip(_generators(), offsets, strict=True):
        generator.set_offset(offset)
