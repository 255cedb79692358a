"""Sets of inputs: the same tensors in each call, or tensors at new addresses.

A :class:`Ring` holds the program's inputs (set 0) and clones of them, allocated before timing. A clone copies whole
storages, so strides, offsets, overlaps and shared storage stay. A byte budget limits the number of sets, which is at
least two. :meth:`Ring.restore` resets a set from a copy that the program never sees.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from .program import Program


@dataclass(frozen=True, slots=True)
class InputSet:
    """Arguments for one call."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    storages: tuple[torch.UntypedStorage, ...]  # of the tensors, in the same order in each set


class Ring:
    """Input sets of one program: at most ``sets`` of them, the program's own included."""

    def __init__(self, program: Program, sets: int) -> None:
        leaves = filter(_is_cloned, pytree.tree_leaves((program.args, dict(program.kwargs))))
        storages = {storage._cdata: storage for storage in (leaf.untyped_storage() for leaf in leaves)}
        own = InputSet(program.args, dict(program.kwargs), tuple(storages.values()))
        nbytes = sum(storage.nbytes() for storage in own.storages)
        affordable = budget_nbytes(program.device) // nbytes if nbytes else sets
        self._pristine = _clone(own)
        extra = max(1, min(sets, affordable) - 1)  # the untouched copy has a cost too
        self.sets = [own, *(_clone(own) for _ in range(extra))]
        self._fresh = itertools.cycle(self.sets)

    def __len__(self) -> int:
        return len(self.sets)

    def same(self) -> Iterator[InputSet]:
        """The program's own inputs, repeatedly."""
        return itertools.repeat(self.sets[0])

    def fresh(self) -> Iterator[InputSet]:
        """The next set each time, continuing after the last iterator, so no two consecutive calls use the same set."""
        return self._fresh

    def restore(self, inputs: InputSet) -> None:
        """Gives a set the initial values of the program's inputs."""
        for storage, pristine in zip(inputs.storages, self._pristine.storages, strict=True):
            storage.copy_(pristine)

    def blank(self, inputs: InputSet) -> None:
        """Overwrites a set with zeros, which reveals a program that still reads it."""
        for storage in inputs.storages:
            storage.fill_(0)


def budget_nbytes(device: torch.device) -> int:
    """For all sets but the first: a quarter of the device's free memory; on the CPU a GiB."""
    return torch.cuda.mem_get_info(device)[0] // 4 if device.type == "cuda" else 1 << 30


def _clone(own: InputSet) -> InputSet:
    """The same arguments, with clones of the tensors."""
    storages = {}
    for storage in own.storages:
        clone = storage.clone()
        is_pinned = storage.device.type == "cpu" and storage.is_pinned()
        storages[storage._cdata] = clone.pin_memory() if is_pinned else clone

    def rebuild(leaf: Any) -> Any:
        if not _is_cloned(leaf):
            return leaf
        storage = storages[leaf.untyped_storage()._cdata]
        clone = torch.empty(0, dtype=leaf.dtype, device=leaf.device)
        with torch.no_grad():
            clone.set_(storage, leaf.storage_offset(), leaf.size(), leaf.stride())
            clone = clone.conj() if leaf.is_conj() else clone
            clone = torch._neg_view(clone) if leaf.is_neg() else clone
        return clone.requires_grad_(leaf.requires_grad)

    args, kwargs = pytree.tree_map(rebuild, (own.args, own.kwargs))
    return InputSet(args, kwargs, tuple(storages.values()))


def _is_cloned(leaf: Any) -> bool:
    """Whether a value is a tensor with a storage; one of a wrapper subclass is the same in all sets."""
    return isinstance(leaf, torch.Tensor) and not is_traceable_wrapper_subclass(leaf)
