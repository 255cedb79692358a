"""Compares the outputs of two ways of running a program, tensor by tensor.

Tensors are in the order and under the paths of :func:`program.tensors_of`. Equal infinities, and NaNs at the same
place, count as equal. A different number of outputs, another shape, dtype or device, or a NaN or infinity on one side
only is a *problem*: no number describes it, and the outputs are wrong.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from .program import tensors_of

_CHUNK = 1 << 26  # elements compared at once: a few temporaries of half a gigabyte

Snapshot = Sequence[tuple[str, torch.Tensor]]


def snapshot(outputs: Any) -> Snapshot:
    """Clones of all tensors in ``outputs``, which survive the next call."""
    return [(name, _plain(tensor.detach()).clone()) for name, tensor in tensors_of(outputs)]


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.resolve_conj().resolve_neg() if tensor.layout == torch.strided else tensor.to_dense()


def differences(outputs: Snapshot, reference: Snapshot) -> Iterator[tuple[str, float | str]]:
    """The name of each tensor, with the largest absolute difference or the problem in words."""
    names, expected = [n for n, _ in outputs], [n for n, _ in reference]
    if names != expected:
        found, wanted = (f"({', '.join(n[:3])}{', ...' if len(n) > 3 else ''})" for n in (names, expected))
        yield "what it returns", f"{len(names)} output tensors {found}, expected {len(expected)} {wanted}"
        return
    for (name, ours), (_, theirs) in zip(outputs, reference, strict=True):
        yield name, _difference(f"output{name}", ours, theirs)


def _difference(output: str, ours: torch.Tensor, theirs: torch.Tensor) -> float | str:
    for what in ("shape", "dtype", "device"):
        found, wanted = getattr(ours, what), getattr(theirs, what)
        if found != wanted:
            return f"{output} has {what} {found}, expected {wanted}"
    if ours.is_complex():
        ours, theirs = torch.view_as_real(ours), torch.view_as_real(theirs)
    wide = torch.float64 if ours.dtype == torch.float64 or not ours.is_floating_point() else torch.float32
    largest = 0.0
    for mine, other in zip(ours.reshape(-1).split(_CHUNK), theirs.reshape(-1).split(_CHUNK), strict=True):
        if mine.numel() == 0:
            continue
        x, y = mine.to(wide), other.to(wide)
        same = (x == y) | (x.isnan() & y.isnan())
        apart = torch.where(same, 0.0, (x - y).abs()).max().item()
        if not apart < float("inf"):
            return f"{output} has NaN or infinity where the reference has none, or lacks one"
        largest = max(largest, apart)
    return largest
