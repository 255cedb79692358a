"""What a workload is, and the register of all of them.

A builder takes a device and returns a :class:`Program`: "cuda" for the real thing, "cpu" for a look without a GPU,
"meta" for parameters and GPU inputs without data (inputs that are on the CPU in the real program stay there). Its
keyword arguments are sizes; their defaults are the workload, smaller ones are for tests. Weights and inputs are random
under a fixed seed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from pygraph_trees.benchmark.program import Program

SEED = 20
# A dropout that is computed like any other and drops nothing: gradients can be compared with eager's.
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
    """Everything random in the block comes from the seed, and new tensors are made on ``device``."""
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
    """The model, in training, with no coin for each of its layers whether it is left out; none of them ever is.

    Up to transformers 5.17 at least the coin is a tensor also where nothing is left out, and Dynamo breaks the graph at
    each layer. What holds the layers is told that it does not train, so that its own dropout, of what goes into the
    first one, is not computed either.
    """
    for module in model.modules():
        if hasattr(module, "layerdrop"):
            module.training = False
    return model
