"""The allocations of generated code, watched and replaced during one run.

Generated code allocates with ``empty_strided_cuda``, a global of its module. :class:`Allocations` tells which
allocation an output is in, and may return given tensors instead of new ones. :func:`watching` replaces the global with
it. Libraries allocate outputs too: a captured run copies those to given tensors.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from pygraph_trees.cuda.extent import copy_bits

_NAME = "empty_strided_cuda"  # of the global in generated code: sizes, strides, dtype


@dataclass(frozen=True, slots=True)
class Memory:
    """The allocation that an output is in."""

    number: int | None  # among the allocations of generated code in one run; None if a library allocated it
    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


class Allocations:
    """The allocations of one run of generated code."""

    def __init__(
        self, given: Mapping[int, torch.Tensor] | None = None, copied_to: Mapping[int, torch.Tensor] | None = None
    ) -> None:
        """Args:
        given: tensors that are returned instead of new ones, by the number of the allocation.
        copied_to: tensors to which :meth:`finished` copies outputs, by the number of the output.
        """
        self._given = dict(given or {})
        self._copied_to = dict(copied_to or {})
        self._count = 0
        self._latest: dict[int, tuple[Memory, StorageWeakRef]] = {}  # by address

    def allocate(self, upstream: Callable[..., torch.Tensor], size: Any, stride: Any, dtype: torch.dtype) -> Any:
        number, self._count = self._count, self._count + 1
        memory = Memory(number, tuple(size), tuple(stride), dtype)
        tensor = self._given.pop(number, None)
        if tensor is None or not _is_like(tensor, memory):
            tensor = upstream(size, stride, dtype)
        self._latest[tensor.data_ptr()] = memory, StorageWeakRef(tensor.untyped_storage())
        return tensor

    def finished(self, outputs: Any) -> Any:
        """The outputs of the run; if it is captured, some are replaced by the tensors that the graph copies them to."""
        found = {
            number: tensor
            for number, tensor in self._copied_to.items()
            if _is_like(outputs[number], Memory(None, tuple(tensor.shape), tensor.stride(), tensor.dtype))
        }
        if not found or not torch.cuda.is_current_stream_capturing():
            return outputs
        with torch.inference_mode():  # both kinds of tensors may be written to
            copy_bits(list(found.values()), [outputs[number] for number in found])
        return [found.get(number, output) for number, output in enumerate(outputs)]

    def memory_of(self, outputs: Iterable[Any]) -> dict[int, Memory]:
        """The allocation in which each output begins; if several outputs share one, only the first is listed."""
        found: dict[int, Memory] = {}
        for number, output in enumerate(outputs):
            if isinstance(output, torch.Tensor) and output.numel():
                memory, storage = self._latest.pop(output.untyped_storage().data_ptr(), (None, None))
                if memory is not None and storage is not None and not storage.expired():
                    found[number] = memory
        return found


def memory_of_libraries(outputs: Sequence[Any], is_allocated: Callable[[int], bool]) -> dict[int, Memory]:
    """The outputs that fill a storage of their own, as libraries allocate them.

    Args:
        is_allocated: whether the run that returned the outputs allocated the memory at an address.
    """
    shared = Counter(output.untyped_storage().data_ptr() for output in outputs if isinstance(output, torch.Tensor))
    return {
        number: Memory(None, tuple(output.shape), output.stride(), output.dtype)
        for number, output in enumerate(outputs)
        if isinstance(output, torch.Tensor)
        and output.numel()
        and not (output.is_conj() or output.is_neg())
        and output.untyped_storage().nbytes() == output.nbytes
        and output.stride() == torch.empty_like(output, device="meta").stride()  # no elements overlap
        and shared[output.data_ptr()] == 1
        and is_allocated(output.data_ptr())
    }


def _is_like(tensor: Any, memory: Memory) -> bool:
    return isinstance(tensor, torch.Tensor) and (tuple(tensor.shape), tensor.stride(), tensor.dtype) == (
        memory.size,
        memory.stride,
        memory.dtype,
    )


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
