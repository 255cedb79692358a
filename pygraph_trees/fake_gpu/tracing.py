"""Traces a program with Dynamo as if its parameters and inputs were on the fake GPU.

:func:`lower` runs the program once on fake tensors. Whether it returns or raises, modules, arguments and the compilers'
state are as before; only functions that were compiled earlier are compiled again at their next call.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FunctionType, MethodType
from typing import Any
from unittest import mock

import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch._dynamo import convert_frame, eval_frame, pgo
from torch._dynamo.eval_frame import OptimizedModule, innermost_fn
from torch._dynamo.utils import counters
from torch._inductor import metrics
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)

from pygraph_trees.errors import PygraphError

from .computed_on_cpu import CPU, GPU, like
from .lowering import LoweredGraph, Lowerings
from .presence import absent_gpu
from .replacing import replaced


class ValueNeededError(PygraphError):
    """The program looked at data; ``graphs`` holds what was lowered before."""

    template = (
        "{function} reads the value of a tensor ({operator}) outside of compiled code, which a fake GPU does not have. "
        "Graphs lowered before that: {count}."
    )
    graphs: list[LoweredGraph]


class NothingToLowerError(PygraphError):
    template = "{function} ran without any operation on tensors that Dynamo could compile."


def _fake(mode: FakeTensorMode, fakes: dict[int, Tensor], tensor: Tensor, device: torch.device) -> Tensor:
    """A fake tensor like ``tensor`` on ``device``, with its Python attributes; a parameter for a parameter."""
    if id(tensor) in fakes:  # a tensor has one, so that tied parameters stay tied
        return fakes[id(tensor)]
    fake = FakeTensor(mode, tensor.detach(), device) if tensor.is_meta else like(mode, tensor, device)
    if isinstance(tensor, torch.nn.Parameter):
        fake = torch.nn.Parameter(fake, requires_grad=tensor.requires_grad)
    else:
        fake.requires_grad_(tensor.requires_grad)
    for name, value in vars(tensor).items():
        setattr(fake, name, value)
    fakes[id(tensor)] = fake
    return fake


def modules_of(fn: Any) -> dict[torch.nn.Module, bool]:
    """The modules that ``fn`` is or mentions, and whether all of their parameters go to the GPU."""
    owner = getattr(fn, "__self__", fn)
    if isinstance(owner, torch.nn.Module):
        return dict.fromkeys(owner.modules(), True)
    mentioned = (value for value in _mentioned(fn) if isinstance(value, torch.nn.Module))
    return {module: False for value in mentioned for module in value.modules()}


def _mentioned(fn: Any) -> Iterator[Any]:
    """What a callable uses, closes over, is bound to or has as attributes, and what functions among those mention."""
    pending, seen = [fn], set()
    while pending:
        mentioning = pending.pop()
        if id(mentioning) in seen:
            continue
        seen.add(id(mentioning))
        if isinstance(mentioning, FunctionType):
            values = [mentioning.__globals__.get(name) for name in mentioning.__code__.co_names]
            # Functions of other files are not followed: they lead through all of torch.
            values = [v for v in values if not isinstance(v, FunctionType) or v.__globals__ is mentioning.__globals__]
            for cell in mentioning.__closure__ or ():
                with contextlib.suppress(ValueError):  # an empty cell
                    values.append(cell.cell_contents)
        elif isinstance(mentioning, functools.partial):
            values = [mentioning.func, *mentioning.args, *mentioning.keywords.values()]
        else:
            values = [*getattr(mentioning, "__dict__", {}).values()]
            if isinstance(mentioning, MethodType):
                values += [mentioning.__func__, *getattr(mentioning.__self__, "__dict__", {}).values()]
        yield from values
        pending += [v for v in values if isinstance(v, (FunctionType, MethodType, functools.partial))]


@contextlib.contextmanager
def _on_gpu(modules: Mapping[torch.nn.Module, bool], mode: FakeTensorMode) -> Iterator[None]:
    """Replaces parameters, buffers and plain meta attributes by fake tensors; puts the very objects back afterwards."""
    fakes: dict[int, Tensor] = {}
    with contextlib.ExitStack() as restoring:
        for module in modules:
            for place in (vars(module), module._parameters, module._buffers, module._modules):
                restoring.enter_context(mock.patch.dict(place))
        for module, all_on_gpu in modules.items():
            for tensors in (module._parameters, module._buffers):
                for name, tensor in list(tensors.items()):
                    if tensor is None or isinstance(tensor, FakeTensor):
                        continue
                    device = GPU if all_on_gpu or tensor.is_meta else tensor.device
                    if device.type != "cpu":
                        tensors[name] = _fake(mode, fakes, tensor, device)
            for name, value in list(vars(module).items()):
                if isinstance(value, Tensor) and value.is_meta and not isinstance(value, FakeTensor):
                    vars(module)[name] = _fake(mode, fakes, value, CPU)
                elif isinstance(value, list) and any(id(item) in fakes for item in value):
                    vars(module)[name] = [fakes.get(id(item), item) for item in value]  # as nn.LSTM has
        yield


@contextlib.contextmanager
def _compiler_state_restored() -> Iterator[None]:
    """Restores, afterwards, what Dynamo and Inductor remember of compilations in this process."""
    codes = convert_frame.Tracker()
    fresh = {
        convert_frame: {"input_codes": codes, "FRAME_COUNTER": 0, "FRAME_COMPILE_COUNTER": Counter()},
        pgo: {"_CODE_STATE": None, "_INIT_CODE_STATE": None},
        metrics: {name: value for name, value in vars(metrics).items() if type(value) is int},  # restored at the end
    }
    counted = {name: counter.copy() for name, counter in counters.items()}
    backends = set(eval_frame.cached_backends)
    no_profile = {"automatic_dynamic_local_pgo": False, "automatic_dynamic_remote_pgo": False}
    try:
        with (
            torch._dynamo.config.patch(suppress_errors=False, **no_profile),
            replaced([(owner, name, value) for owner, values in fresh.items() for name, value in values.items()]),
        ):
            yield
    finally:
        for reference in codes.seen:
            if (code := reference()) is not None:
                eval_frame.reset_code(code)
        for backend in set(eval_frame.cached_backends) - backends:
            del eval_frame.cached_backends[backend]
        counters.clear()
        counters.update(counted)


def lower(
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    arch: str = "sm_90",
    *,
    training: bool = False,
) -> list[LoweredGraph]:
    """Inductor's result for ``fn(*args, **kwargs)`` under ``mode="reduce-overhead"`` on a GPU of type ``arch``.

    It has one graph for each that Dynamo traces, in order; with ``training``, the forward and the backward of each.
    These tensors are on ``cuda:0``, the others on their own device:

    * all parameters and buffers of ``fn``, or of the module that the method ``fn`` is bound to, as after ``.cuda()``;
    * those of modules that a function closes over or an object has, and arguments, if they are on ``meta``. A plain
      tensor attribute of a module is on the CPU even then, since ``.cuda()`` skips it.

    Raises :class:`UnknownArchitectureError`, :class:`ValueNeededError` if the program needs data between graph breaks,
    :class:`NothingToLowerError`, and whatever tracing and compiling raise.
    """
    fn = fn._orig_mod if isinstance(fn, OptimizedModule) else innermost_fn(fn)  # if compiled already
    name = getattr(fn, "__name__", type(fn).__name__)
    owner = fn if isinstance(fn, torch.nn.Module) else getattr(fn, "__self__", None)
    lowerings = Lowerings(name, owner.state_dict() if isinstance(owner, torch.nn.Module) else ())
    graphs = lowerings.graphs
    with absent_gpu(arch):
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        fakes: dict[int, Tensor] = {}

        def as_input(value: Any) -> Any:
            if not isinstance(value, Tensor) or isinstance(value, FakeTensor) or value.device.type == "cpu":
                return value
            return _fake(mode, fakes, value, GPU if value.is_meta else value.device)

        fake_args, fake_kwargs = pytree.tree_map(as_input, (tuple(args), dict(kwargs or {})))
        with (
            _compiler_state_restored(),
            lowerings.recording(),
            _on_gpu(modules_of(fn), mode),
            warnings.catch_warnings(),
            mode,
            torch.set_grad_enabled(training),
            torch.autograd.set_multithreading_enabled(False),  # the engine has no thread for a fake device
        ):
            warnings.filterwarnings("ignore", message="TensorFloat32 tensor cores")
            try:
                torch.compile(fn, backend=lowerings.backend)(*fake_args, **fake_kwargs)
            except (DataDependentOutputException, DynamicOutputShapeException) as e:
                raise ValueNeededError(function=name, operator=e.func, count=len(graphs), graphs=graphs) from e
    if not graphs:
        raise NothingToLowerError(function=name)
    return graphs
