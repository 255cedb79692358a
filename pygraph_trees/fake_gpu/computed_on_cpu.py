"""What torch and Inductor compute for real while tracing and compiling: here on the CPU instead of the GPU.

Inside :func:`constants_off_gpu` these are small constants and the representatives of uniform tensors, whose values
alone matter. Inside :func:`fallback_on_cpu` an operator without a fake implementation runs on zeros, which finds the
shapes of its outputs.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch._inductor.fx_passes import joint_graph
from torch._inductor.graph import GraphLowering
from torch._inductor.virtualized import V
from torch._subclasses import fake_impls, fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.fx.experimental import proxy_tensor
from torch.utils._python_dispatch import TorchDispatchMode

from .replacing import replaced

GPU, CPU = torch.device("cuda", 0), torch.device("cpu")


def _off_gpu(device: torch.device) -> torch.device:
    return CPU if device.type == "cuda" else device


class _OnCpu(TorchDispatchMode):
    """Runs operators for a CUDA device on the CPU."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = pytree.tree_map_only(torch.device, _off_gpu, (args, kwargs or {}))
        return func(*args, **kwargs)


class _FoldOnCpu(joint_graph.UniformValueConstantFolder):
    """Constant folding of uniform values, whose one-element representatives are on the CPU."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        with _OnCpu():
            super().__init__(*args, **kwargs)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        with _OnCpu():
            return super().run(*args, **kwargs)


def _constant_on(graph: GraphLowering, name: str, device: torch.device | None) -> str:
    """``GraphLowering.constant_name``: the name of the constant ``name`` on ``device``, copied there if needed."""
    constant = graph.constants[name]
    if device is None or constant.device == device:
        return name
    moved = f"{name}_{device.type}{device.index or 0}"
    if moved not in graph.constants:
        with V.fake_mode:
            graph.constants[moved] = V.fake_mode.from_tensor(constant, static_shapes=True).to(device)
        graph.constant_reprs[moved] = f"{graph.constant_reprs[name]} on {device}"
        graph.allocated_constant_name[moved] = moved
    return moved


@contextlib.contextmanager
def _unset_fake_and_on_cpu() -> Iterator[None]:
    """The context that tracing enters to compute a constant for real."""
    with unset_fake_temporarily(), _OnCpu():
        yield


def constants_off_gpu() -> contextlib.AbstractContextManager[None]:
    return replaced(
        [
            (proxy_tensor, "unset_fake_temporarily", _unset_fake_and_on_cpu),
            (joint_graph, "UniformValueConstantFolder", _FoldOnCpu),
            (GraphLowering, "constant_name", _constant_on),
        ]
    )


def like(mode: FakeTensorMode, tensor: torch.Tensor, device: torch.device) -> FakeTensor:
    meta = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")
    return FakeTensor(mode, meta, device)


def _run_on_cpu(
    upstream: Callable[..., Any],
    mode: FakeTensorMode,
    func: Any,
    flat_args: Sequence[Any],
    spec: Any,
    why: RuntimeError,
) -> Any:
    given: dict[int, FakeTensor] = {}  # by substitute

    def on_cpu(arg: Any) -> Any:
        if isinstance(arg, FakeTensor) and arg.fake_device.type == "cuda":
            substitute = like(mode, arg, CPU)
            given[id(substitute)] = arg
            return substitute
        return _off_gpu(arg) if isinstance(arg, torch.device) else arg

    substitutes = [on_cpu(arg) for arg in flat_args]
    if not given:
        return upstream(mode, func, flat_args, spec, why)
    try:
        outputs = upstream(mode, func, substitutes, spec, why)
    except NotImplementedError:
        raise why from None
    return pytree.tree_map_only(FakeTensor, lambda t: given[id(t)] if id(t) in given else like(mode, t, GPU), outputs)


def fallback_on_cpu() -> contextlib.AbstractContextManager[None]:
    """Inside, an operator without a fake implementation runs on the CPU; without a CPU kernel it fails as before."""
    run = functools.partial(_run_on_cpu, fake_tensor.run_fallback_kernel)
    return replaced([(module, "run_fallback_kernel", run) for module in (fake_tensor, fake_impls)])
