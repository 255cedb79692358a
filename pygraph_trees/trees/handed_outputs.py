"""Outputs that are handed out: a graph writes them to memory that each call allocates, as un-graphed code does.

Generated code allocates with ``empty_strided_cuda``, a global of its module. :class:`Allocations` watches one run of
it: which allocation an output is in, and which allocations are replaced by memory that is given. A function that hands
out outputs has further inputs, a tensor for each, which it returns: recordings see inputs that are written to.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

_NAME = "empty_strided_cuda"  # of the global in generated code: sizes, strides, dtype


@dataclass(frozen=True, slots=True)
class Memory:
    """An allocation of generated code."""

    number: int  # among the allocations of one run
    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


class Allocations:
    """The allocations of one run of generated code."""

    def __init__(self, given: Mapping[int, torch.Tensor] | None = None) -> None:
        """``given``: tensors that are returned instead of new ones, by the number of the allocation."""
        self._given = dict(given or {})
        self._count = 0
        self._latest: dict[int, Memory] = {}  # by address

    def allocate(self, upstream: Callable[..., torch.Tensor], size: Any, stride: Any, dtype: torch.dtype) -> Any:
        number, self._count = self._count, self._count + 1
        memory = Memory(number, tuple(size), tuple(stride), dtype)
        tensor = self._given.pop(number, None)
        if tensor is None or not _is_like(tensor, memory):
            tensor = upstream(size, stride, dtype)
        self._latest[tensor.data_ptr()] = memory
        return tensor

    def behind(self, outputs: Iterable[Any]) -> dict[int, Memory]:
        """By output, the allocation that it begins at. Of outputs in the same memory, only the first is listed."""
        # An output is alive since its allocation, so no later one has the same address.
        found: dict[int, Memory] = {}
        for number, output in enumerate(outputs):
            if isinstance(output, torch.Tensor) and output.numel():
                memory = self._latest.pop(output.untyped_storage().data_ptr(), None)
                if memory is not None:
                    found[number] = memory
        return found


def _is_like(tensor: torch.Tensor, memory: Memory) -> bool:
    return (tuple(tensor.shape), tensor.stride(), tensor.dtype) == (memory.size, memory.stride, memory.dtype)


class _Running(threading.local):
    allocations: Allocations | None = None
    templates: Templates | None = None


_running = _Running()
_lock = threading.RLock()  # reentrant: a finalizer may run generated code
_watched: dict[int, list[Any]] = {}  # by id of a module's globals: how many watch it, and torch's function


def is_watching() -> bool:
    """Whether this thread runs generated code whose allocations are watched."""
    return _running.allocations is not None


def generated_by_inductor(model: Any) -> bool:
    """Whether the code of a function allocates as generated code does."""
    return _globals_of(model) is not None


@contextlib.contextmanager
def watching(model: Any, allocations: Allocations | None) -> Iterator[None]:
    """Goes around one run of ``model`` in this thread; with None, allocations are not watched inside."""
    names = _globals_of(model)
    if names is None:
        yield
        return
    with _lock:
        watched = _watched.setdefault(id(names), [0, names[_NAME]])
        watched[0] += 1
        if watched[0] == 1:
            names[_NAME] = functools.partial(_allocate, watched[1])
    before, _running.allocations = _running.allocations, allocations
    try:
        yield
    finally:
        _running.allocations = before
        with _lock:
            watched[0] -= 1
            if watched[0] == 0:
                names[_NAME] = watched[1]
                del _watched[id(names)]


def _allocate(upstream: Callable[..., torch.Tensor], size: Any, stride: Any, dtype: torch.dtype) -> Any:
    allocations = _running.allocations
    if allocations is None:  # another thread's watch
        return upstream(size, stride, dtype)
    return allocations.allocate(upstream, size, stride, dtype)


def _globals_of(model: Any) -> dict[str, Any] | None:
    names: dict[str, Any] | None = getattr(getattr(model, "__func__", model), "__globals__", None)
    return names if names is not None and callable(names.get(_NAME)) else None


@dataclass(frozen=True, slots=True)
class Handed:
    """The outputs that a function hands out: their numbers, and the number of the allocation of each."""

    outputs: tuple[int, ...] = ()
    allocations: tuple[int, ...] = ()

    @staticmethod
    def of(memory: Mapping[int, Memory]) -> Handed:
        return Handed(tuple(memory), tuple(found.number for found in memory.values()))

    def without(self, outputs: Collection[int]) -> Handed:
        kept = [pair for pair in zip(self.outputs, self.allocations, strict=True) if pair[0] not in outputs]
        return Handed(tuple(output for output, _ in kept), tuple(number for _, number in kept))

    def fits(self, memory: Mapping[int, Memory]) -> bool:
        """Whether these outputs were found in these allocations."""
        pairs = zip(self.outputs, self.allocations, strict=True)
        return all(output in memory and memory[output].number == number for output, number in pairs)


class Templates:
    """Makes the tensors that a call of a function is given for its outputs."""

    def __init__(self, handed: Handed, memory: Mapping[int, Memory], device: torch.device) -> None:
        """``memory``: the function's allocations by output, which ``handed`` must fit."""
        found = [memory[output] for output in handed.outputs]
        meta = [torch.empty_strided(m.size, m.stride, dtype=m.dtype, device="meta") for m in found]
        self.handed = handed
        self.native = (torch.empty(0, device=device), *meta)  # the form in which C++ takes them

    def __len__(self) -> int:
        return len(self.native) - 1

    def allocate(self) -> list[torch.Tensor]:
        like, *meta = self.native
        return [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=like.device) for t in meta]

    def allocations(self, tensors: Sequence[torch.Tensor]) -> Allocations:
        """``tensors``: as :meth:`allocate` makes them."""
        return Allocations(dict(zip(self.handed.allocations, tensors, strict=True)))


def templates_of_call() -> Templates | None:
    """The templates from which this thread's call of a manager made its last inputs; None if it made none."""
    return _running.templates


@contextlib.contextmanager
def given_memory(templates: Templates | None) -> Iterator[None]:
    """Goes around a call of a manager whose last inputs were made from ``templates``."""
    before, _running.templates = _running.templates, templates
    try:
        yield
    finally:
        _running.templates = before
