"""A program to measure, one call of it, and sets of inputs: the same tensors in each call, or tensors at new addresses.

:meth:`Program.step` makes a call, which begins a step of CUDA graph trees in every way. The next one may overwrite the
outputs: clone them first (``verify.snapshot``). A :class:`Ring` holds the program's inputs and clones of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from types import CellType
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from pygraph_trees.cuda.extent import tensors_with_memory
from pygraph_trees.errors import PygraphError


class NoLossError(PygraphError):
    template = (
        "training needs a scalar to differentiate: expected outputs with a .loss or with floating-point tensors that "
        "require gradients, got {found}; give the program a loss of its own"
    )


def tensors_of(outputs: Any) -> list[tuple[str, torch.Tensor]]:
    """All tensors in registered pytree containers and in attributes of other objects, with paths, in a fixed order."""
    found: list[tuple[str, torch.Tensor]] = []
    for path, leaf in pytree.tree_leaves_with_path(outputs):
        name = pytree.keystr(path)
        if isinstance(leaf, torch.Tensor):
            found.append((name, leaf))
        elif hasattr(leaf, "__dict__") and not isinstance(leaf, (type, torch.nn.Module)) and not callable(leaf):
            inside = {inner: value for inner, value in vars(leaf).items() if isinstance(value, torch.Tensor)}
            found += [(f"{name}.{inner}", inside[inner]) for inner in sorted(inside)]
    return found


def default_loss(outputs: Any) -> torch.Tensor:
    """``outputs.loss`` if it exists, otherwise the sum of all floating-point tensors that require gradients."""
    loss = outputs.get("loss") if isinstance(outputs, Mapping) else getattr(outputs, "loss", None)
    if isinstance(loss, torch.Tensor):
        return loss
    terms = [t.float().sum() for _, t in tensors_of(outputs) if t.is_floating_point() and t.requires_grad]
    if not terms:
        raise NoLossError(found=type(outputs).__name__)
    return torch.stack(terms).sum() if len(terms) > 1 else terms[0]


@dataclass(slots=True, eq=False)
class Program:
    """A callable with its inputs, the same for every way of running it."""

    fn: Callable[..., Any]  # a module or function, as passed to torch.compile
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    training: bool = False
    is_step: bool = False  # ``fn`` computes gradients itself
    context: Callable[[], AbstractContextManager[Any]] = nullcontext  # around a call; in training, forward and loss
    loss: Callable[[Any], torch.Tensor] = default_loss
    parameters: Sequence[torch.Tensor] | None = None  # that get gradients, besides inputs; None: a module's own
    name: str = "program"
    batch: int = 1
    _leaves: tuple[torch.Tensor, ...] = field(init=False, repr=False, default=())
    _input_gradients: bool = field(init=False, repr=False, default=False)

    def __post_init__(self) -> None:
        own = self.fn.parameters() if isinstance(self.fn, torch.nn.Module) else ()
        self._leaves = tuple(p for p in (own if self.parameters is None else self.parameters) if p.requires_grad)
        self._input_gradients = bool(_differentiable(self.args, self.kwargs))

    @property
    def mode(self) -> str:
        return "training" if self.training else "a step" if self.is_step else "inference"

    @property
    def device(self) -> torch.device:
        """The first CUDA device of inputs, parameters, buffers and a function's closure; the CPU if there is none."""
        cells = getattr(self.fn, "__closure__", None) or ()
        closed_over = [cell.cell_contents for cell in cells if cell != CellType()]  # a cell may still be empty
        devices = (tensor.device for tensor in (*self._tensors(), *_tensors(closed_over), *_state(closed_over)))
        return next((device for device in devices if device.type == "cuda"), torch.device("cpu"))

    @property
    def resident_nbytes(self) -> int:
        """Bytes of parameters, buffers and inputs on the device; shared storage counts once."""
        device = self.device
        inner = itertools.chain.from_iterable(map(tensors_with_memory, self._tensors()))
        storages = [t.untyped_storage() for t in inner if t.device == device]
        return sum({s.data_ptr(): s.nbytes() for s in storages}.values())

    def _tensors(self) -> list[torch.Tensor]:
        return [*_tensors((self.args, dict(self.kwargs))), *_state([self.fn]), *self._leaves]

    def step(self, compiled_fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """One call: the outputs; in training, ``(loss, gradients)`` of forward, loss and backward."""
        # Upstream needs the mark if a step has several compiled calls. Once one way marks steps, all ways must.
        torch.compiler.cudagraph_mark_step_begin()
        if not self.training:
            with self.context():
                return compiled_fn(*args, **kwargs)
        leaves = self.clear_gradients(args, kwargs)
        with self.context():
            loss = self.loss(compiled_fn(*args, **kwargs))
        loss.backward()
        return loss.detach(), [leaf.grad for leaf in leaves]

    def clear_gradients(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Sequence[torch.Tensor]:
        """Drops the last step's gradients, so that they do not outlive their way of running; returns what gets them."""
        leaves = (*self._leaves, *(_differentiable(args, kwargs) if self._input_gradients else ()))
        for leaf in leaves:
            leaf.grad = None
        return leaves


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _state(values: Sequence[Any]) -> list[torch.Tensor]:
    """The parameters and buffers of the modules among the values."""
    modules = [value for value in values if isinstance(value, torch.nn.Module)]
    return [tensor for module in modules for tensor in (*module.parameters(), *module.buffers())]


def _differentiable(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[torch.Tensor, ...]:
    return tuple(t for t in _tensors((tuple(args), dict(kwargs))) if t.requires_grad and t.is_leaf)


@dataclass(frozen=True, slots=True)
class InputSet:
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    storages: tuple[torch.UntypedStorage, ...]  # of the tensors, in the same order in each set


class Ring:
    """Input sets of one program: its own and clones of their storages, as many as fit the budget, and at least two."""

    def __init__(self, program: Program, sets: int) -> None:
        leaves = filter(_is_cloned, pytree.tree_leaves((program.args, dict(program.kwargs))))
        storages = {storage._cdata: storage for storage in (leaf.untyped_storage() for leaf in leaves)}
        own = InputSet(program.args, dict(program.kwargs), tuple(storages.values()))
        nbytes = sum(storage.nbytes() for storage in own.storages)
        affordable = budget_nbytes(program.device) // nbytes if nbytes else sets
        self._pristine = _clone(own)  # which the program never sees
        extra = max(1, min(sets, affordable) - 1)  # the untouched copy has a cost too
        self.sets = [own, *(_clone(own) for _ in range(extra))]
        self.same = itertools.repeat(own)
        self.fresh = itertools.cycle(self.sets)  # no two consecutive calls use the same set

    def restore(self, inputs: InputSet) -> None:
        """Gives a set the initial values of the program's inputs."""
        for storage, pristine in zip(inputs.storages, self._pristine.storages, strict=True):
            storage.copy_(pristine)


def budget_nbytes(device: torch.device) -> int:
    """For all sets but the first: a quarter of the device's free memory; on the CPU a GiB."""
    return torch.cuda.mem_get_info(device)[0] // 4 if device.type == "cuda" else 1 << 30


def _clone(own: InputSet) -> InputSet:
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
