"""The register of workloads.

A builder takes a device and returns a :class:`Program`: "cuda" to measure, "cpu" to try without a GPU, "meta" for
parameters and GPU inputs without data (inputs that the real program has on the CPU stay there). Its keyword arguments
are sizes: the defaults are the workload, smaller ones are for tests. Weights and inputs are random under a fixed seed.
A name registered twice raises :class:`ValueError`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from pygraph_trees.benchmark.program import Program

SEED = 20
# A dropout that is computed like any other and drops nothing, so gradients can be compared with eager's.
DROPS_NOTHING = 1e-30

Builder = Callable[..., Program]


@dataclass(frozen=True, slots=True)
class Workload:
    """A named program that can be built on a device."""

    name: str
    mode: str  # "inference" or "training"
    batch: int
    build: Builder
    doc: str  # one line


WORKLOADS: dict[str, Workload] = {}


def workload(name: str, mode: str, batch: int) -> Callable[[Builder], Builder]:
    """Registers a builder; the first line of its docstring describes the workload."""

    def register(build: Builder) -> Builder:
        if name in WORKLOADS:
            raise ValueError(f"workload {name} is registered already, by {WORKLOADS[name].build.__module__}")
        doc = (build.__doc__ or "").strip().splitlines()[0]
        WORKLOADS[name] = Workload(name, mode, batch, build, doc)
        return build

    return register


@contextmanager
def seeded(device: torch.device | str) -> Iterator[None]:
    """Seeds all random numbers in the block, and makes new tensors on ``device``."""
    torch.manual_seed(SEED)
    with torch.device(device):
        yield


def inference(device: torch.device | str) -> Callable[[], AbstractContextManager[Any]]:
    """The context of a model's call: no gradients, bfloat16 autocast."""

    @contextmanager
    def context() -> Iterator[None]:
        with torch.no_grad(), training(device)():
            yield

    return context


def training(device: torch.device | str) -> Callable[[], AbstractContextManager[Any]]:
    """The context of a training step's forward: bfloat16 autocast."""
    kind = "cpu" if torch.device(device).type == "cpu" else "cuda"
    return lambda: torch.autocast(kind, torch.bfloat16)


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
