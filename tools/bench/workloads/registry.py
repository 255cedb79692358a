"""The register of workloads.

A builder returns a model, or a function, and its inputs. It is called with a device as torch's default: "cuda" to
measure, "cpu" to try, "meta" to explain. Its keyword arguments are sizes: the defaults are the workload, smaller ones
are for tests. A name registered twice raises :class:`ValueError`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from pygraph_trees.benchmark.program import Program

SEED = 20
# A dropout that is computed like any other and drops nothing, so gradients can be compared with eager's.
DROPS_NOTHING = 1e-30

Made = tuple[Callable[..., Any], tuple[Any, ...] | dict[str, Any]]
Builder = Callable[..., Made]


@dataclass(frozen=True, slots=True)
class Workload:
    """A named program that can be built on a device."""

    name: str
    mode: str  # "inference" or "training"
    batch: int
    autocast: bool  # to bfloat16
    builder: Builder

    @property
    def doc(self) -> str:
        """One line."""
        return (self.builder.__doc__ or "").strip().splitlines()[0]

    def build(self, device: torch.device | str, **sizes: Any) -> Program:
        torch.manual_seed(SEED)
        with torch.device(device):
            fn, inputs = self.builder(**sizes)
        args, kwargs = ((), inputs) if isinstance(inputs, dict) else (inputs, {})
        of = {"training": self.mode == "training", "name": self.name, "batch": sizes.get("batch", self.batch)}
        return Program(fn, args, kwargs, context=self._context(device), **of)

    def _context(self, device: torch.device | str) -> Callable[[], AbstractContextManager[Any]]:
        """The context of a call, or of a training step's forward: autocast; in inference, no gradients."""
        if not self.autocast:
            return nullcontext
        autocast = partial(torch.autocast, "cpu" if torch.device(device).type == "cpu" else "cuda", torch.bfloat16)

        @contextmanager
        def inference() -> Iterator[None]:
            with torch.no_grad(), autocast():
                yield

        return autocast if self.mode == "training" else inference


WORKLOADS: dict[str, Workload] = {}


def workload(name: str, mode: str, batch: int, autocast: bool = True) -> Callable[[Builder], Builder]:
    """Registers a builder; the first line of its docstring describes the workload."""

    def register(builder: Builder) -> Builder:
        if name in WORKLOADS:
            raise ValueError(f"workload {name} is registered already, by {WORKLOADS[name].builder.__module__}")
        WORKLOADS[name] = Workload(name, mode, batch, autocast, builder)
        return builder

    return register


def without_layer_drop(model: torch.nn.Module) -> torch.nn.Module:
    """Returns the model, in training, without the random choice of layers to drop; none is ever dropped.

    Up to transformers 5.17 at least, the choice is a tensor even if nothing is dropped, and Dynamo breaks the graph at
    each layer. The module that holds the layers is set to inference, so its own dropout, on the input of the first
    layer, is not computed either.
    """
    for module in model.modules():
        if hasattr(module, "layerdrop"):
            module.training = False
    return model
