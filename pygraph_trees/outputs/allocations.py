"""The memory that one run of generated code allocates, watched or replaced.

Generated code allocates with ``empty_strided_cuda``, a global of its module, for which :func:`run_generated` gives it
another function. Libraries allocate outputs too. A captured run may be given a tensor for each storage with outputs:
generated code gets it instead of a new one, and the graph copies a library's storage to it.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from pygraph_trees.cuda.extent import copy_bits

_NAME = "empty_strided_cuda"  # of the global in generated code: sizes, strides, dtype


@dataclass(frozen=True, slots=True)
class View:
    """An output as a view of its storage."""

    number: int  # of the output
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int  # in elements
    dtype: torch.dtype

    @staticmethod
    def of(number: int, output: torch.Tensor) -> View:
        return View(number, tuple(output.shape), output.stride(), output.storage_offset(), output.dtype)


@dataclass(frozen=True, slots=True)
class Block:
    """The outputs in one storage, and the allocation of the storage."""

    outputs: tuple[int, ...]
    allocation: int | None  # its number among those of generated code in one run; None if a library allocates it


@dataclass(frozen=True, slots=True)
class Storage:
    """A storage with outputs of one run."""

    views: tuple[View, ...]
    allocation: int | None
    nbytes: int
    size: tuple[int, ...]  # as it is allocated
    stride: tuple[int, ...]
    dtype: torch.dtype

    @property
    def block(self) -> Block:
        return Block(tuple(view.number for view in self.views), self.allocation)


class Allocations:
    """The allocations of one run of generated code."""

    def __init__(self, given: Mapping[Block, torch.Tensor] | None = None) -> None:
        """``given``: by block, the tensor in whose storage the outputs of a captured run are put."""
        given = given or {}
        self._given = {block.allocation: tensor for block, tensor in given.items() if block.allocation is not None}
        self._copied_to = {block.outputs: tensor for block, tensor in given.items() if block.allocation is None}
        self._count = 0
        self._latest: dict[int, tuple[int, torch.Tensor, StorageWeakRef]] = {}  # by address

    def allocate(self, upstream: Callable[..., torch.Tensor], size: Any, stride: Any, dtype: torch.dtype) -> Any:
        number, self._count = self._count, self._count + 1
        like = torch.empty_strided(size, stride, dtype=dtype, device="meta")
        given = self._given.pop(number, None)
        if given is not None and given.untyped_storage().nbytes() == like.untyped_storage().nbytes():
            tensor = tensor_in(given.untyped_storage(), View(-1, tuple(size), tuple(stride), 0, dtype))
        else:
            tensor = upstream(size, stride, dtype)
        self._latest[tensor.data_ptr()] = number, like, StorageWeakRef(tensor.untyped_storage())
        return tensor

    def finished(self, outputs: Any) -> Any:
        """The outputs of a captured run; views of the given tensors replace those in storages that the graph copies."""
        pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        found = list(outputs)
        for numbers, tensor in self._copied_to.items():
            storage, to = outputs[numbers[0]].untyped_storage(), tensor.untyped_storage()
            is_same = all(outputs[number].untyped_storage().data_ptr() == storage.data_ptr() for number in numbers)
            if is_same and storage.nbytes() == to.nbytes():
                pairs.append((bytes_of(to), bytes_of(storage)))
                for number in numbers:
                    found[number] = tensor_in(to, View.of(number, outputs[number]))
        if not pairs:
            return outputs
        with torch.inference_mode():  # both kinds of tensors may be written to
            copy_bits([to for to, _ in pairs], [of for _, of in pairs])
        return found

    def storages(self, outputs: Sequence[Any], is_in_pool: Callable[[int], bool]) -> tuple[Storage, ...]:
        """The storages that the run allocated and that hold outputs; a library may have allocated those in the pool."""
        by_storage: dict[int, list[View]] = {}
        for number, output in enumerate(outputs):
            if isinstance(output, torch.Tensor) and output.numel() and not (output.is_conj() or output.is_neg()):
                by_storage.setdefault(output.untyped_storage().data_ptr(), []).append(View.of(number, output))
        found: list[Storage] = []
        for address, views in by_storage.items():
            storage = outputs[views[0].number].untyped_storage()
            nbytes, latest = storage.nbytes(), self._latest.pop(address, None)
            if latest is not None and not latest[-1].expired():
                number, like, _ = latest
                found.append(Storage(tuple(views), number, nbytes, tuple(like.shape), like.stride(), like.dtype))
            elif is_in_pool(address):
                found.append(Storage(tuple(views), None, nbytes, (nbytes,), (1,), torch.uint8))
        return tuple(found)


def tensor_in(storage: torch.UntypedStorage, view: View) -> torch.Tensor:
    made = torch.empty(0, dtype=view.dtype, device=storage.device)
    return made.set_(storage, view.offset, view.size, view.stride)


def bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, 0, (storage.nbytes(),), (1,))


class _Watching(threading.local):
    note: Callable[[torch.Tensor], None] | None = None


_watching = _Watching()


@contextlib.contextmanager
def watching(note: Callable[[torch.Tensor], None]) -> Iterator[None]:
    """Inside, ``note`` is given each tensor that torch allocates for generated code that this thread runs."""
    before, _watching.note = _watching.note, note
    try:
        yield
    finally:
        _watching.note = before


def run_generated(model: Any, inputs: list[Any], allocations: Allocations | None = None) -> Any:
    """Runs compiled code. If Inductor generated it, ``allocations`` watch or replace what it allocates.

    It runs with globals of its own, and so do the functions of its module that it calls. Other runs at the same time,
    in any thread, see the module as it is.
    """
    note = _watching.note
    names = None if allocations is None and note is None else _globals_of(model)
    if names is None:
        return model(inputs)
    allocate = names[_NAME] if note is None else functools.partial(_noted, names[_NAME], note)
    own = {**names, _NAME: allocate if allocations is None else functools.partial(allocations.allocate, allocate)}

    def with_own(value: Any) -> Any:
        if not isinstance(value, FunctionType) or value.__globals__ is not names:
            return value
        made = FunctionType(value.__code__, own, value.__name__, value.__defaults__, value.__closure__)
        made.__kwdefaults__ = value.__kwdefaults__
        return made

    try:
        own |= {name: with_own(value) for name, value in own.items()}
        if (runner := getattr(model, "__self__", None)) is None:
            return with_own(model)(inputs)
        runner = copy.copy(runner)
        if partitions := getattr(runner, "partitions", None):
            runner.partitions = [with_own(partition) for partition in partitions]
        return with_own(model.__func__)(runner, inputs)
    finally:
        own.clear()  # the functions in it refer to it
        own["__name__"] = names.get("__name__")  # tells in a traceback whose frame it is


def generated_by_inductor(model: Any) -> bool:
    """Whether a function's code allocates as generated code does."""
    return _globals_of(model) is not None


def constants_of(model: Any) -> list[torch.Tensor]:
    """The tensors in the module of a function's generated code."""
    return [value for value in (_globals_of(model) or {}).values() if isinstance(value, torch.Tensor)]


def _noted(upstream: Callable[..., torch.Tensor], note: Callable[[torch.Tensor], None], *args: Any) -> torch.Tensor:
    made = upstream(*args)
    note(made)
    return made


def _globals_of(model: Any) -> dict[str, Any] | None:
    names: dict[str, Any] | None = getattr(getattr(model, "__func__", model), "__globals__", None)
    return names if names is not None and callable(names.get(_NAME)) else None
