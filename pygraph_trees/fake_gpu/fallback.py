"""Finds the output shapes of operators without a fake implementation, without a GPU.

FakeTensorMode finds them by running the operator on zeros, on the device of its inputs. Inside :func:`fallback_on_cpu`
an operator on CUDA tensors runs on the CPU instead. If it has no CPU kernel, it fails as an operator without a fake
implementation does.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
import torch.utils._pytree as pytree
from torch._subclasses import fake_impls, fake_tensor
from torch._subclasses.fake_tensor import FakeTensor

from .replacing import replaced

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch._subclasses.fake_tensor import FakeTensorMode

_GPU, _CPU = torch.device("cuda", 0), torch.device("cpu")


def _like(mode: FakeTensorMode, tensor: torch.Tensor, device: torch.device) -> FakeTensor:
    meta = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")
    return FakeTensor(mode, meta, device)


def _run_on_cpu(upstream: Callable[..., Any]) -> Callable[..., Any]:
    def run_fallback_kernel(
        mode: FakeTensorMode, func: Any, flat_args: Sequence[Any], spec: Any, not_implemented: RuntimeError
    ) -> Any:
        given: dict[int, FakeTensor] = {}  # by substitute

        def on_cpu(arg: Any) -> Any:
            if isinstance(arg, FakeTensor) and arg.fake_device.type == "cuda":
                substitute = _like(mode, arg, _CPU)
                given[id(substitute)] = arg
                return substitute
            return _CPU if isinstance(arg, torch.device) and arg.type == "cuda" else arg

        substitutes = [on_cpu(arg) for arg in flat_args]
        if not given:
            return upstream(mode, func, flat_args, spec, not_implemented)
        try:
            outputs = upstream(mode, func, substitutes, spec, not_implemented)
        except NotImplementedError:
            raise not_implemented from None
        return pytree.tree_map_only(
            FakeTensor, lambda t: given[id(t)] if id(t) in given else _like(mode, t, _GPU), outputs
        )

    return run_fallback_kernel


@contextlib.contextmanager
def fallback_on_cpu() -> Iterator[None]:
    """Inside, operators without a fake implementation are tried on the CPU."""
    run = _run_on_cpu(fake_tensor.run_fallback_kernel)
    with replaced([(module, "run_fallback_kernel", run) for module in (fake_tensor, fake_impls)]):
        yield
