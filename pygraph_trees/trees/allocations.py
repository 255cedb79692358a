"""The allocations of generated code, watched and replaced during one run.

Generated code allocates with ``empty_strided_cuda``, a global of its module. :class:`Allocations` tells which
allocation an output is in, and may return given tensors instead of new ones. :func:`watching` replaces the global with
it.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
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

    def memory_of(self, outputs: Iterable[Any]) -> dict[int, Memory]:
        """The allocation in which each output begins; if several outputs share one, only the first is listed."""
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
    """Wraps one run of ``model`` in this thread; with None, its allocations are not watched."""
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
