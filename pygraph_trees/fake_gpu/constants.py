"""Compile-time constants of the fake GPU.

While tracing and compiling, torch and Inductor compute a few constants for real: results of ``torch.tensor([...])``
with at most one element, and one-element tensors that represent uniform tensors during constant folding. Inside
:func:`constants_off_gpu` these are on the CPU instead of the GPU; only their values matter. A larger constant that
Inductor copies to the GPU at compile time becomes a fake tensor there.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
import torch.utils._pytree as pytree
from torch._inductor.fx_passes import joint_graph
from torch._inductor.graph import GraphLowering
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx.experimental import proxy_tensor
from torch.utils._python_dispatch import TorchDispatchMode

from .replacing import replaced

if TYPE_CHECKING:
    from collections.abc import Iterator


class _OnCpu(TorchDispatchMode):
    """Runs operators for a CUDA device on the CPU."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def on_cpu(device: torch.device) -> torch.device:
            return torch.device("cpu") if device.type == "cuda" else device

        args, kwargs = pytree.tree_map_only(torch.device, on_cpu, (args, kwargs or {}))
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


@contextlib.contextmanager
def constants_off_gpu() -> Iterator[None]:
    """Inside, tracing and compiling compute no constant on the GPU."""
    with replaced(
        [
            (proxy_tensor, "unset_fake_temporarily", _unset_fake_and_on_cpu),
            (joint_graph, "UniformValueConstantFolder", _FoldOnCpu),
            (GraphLowering, "constant_name", _constant_on),
        ]
    ):
        yield
