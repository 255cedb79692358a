"""Small programs that are not workloads, by name, and the workloads.

:func:`program_of` builds MLP, MLP-N (the same for any batch size) and ACTOR (small inputs that arrive on the CPU). Any
other name is a workload's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

from pygraph_trees.benchmark.program import Program
from pygraph_trees.cli.target import resolve


def perceptron(device: torch.device) -> Program:
    """Two small layers: almost nothing but the host."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8)).to(device)
    return Program(model, (torch.randn(16, 64, device=device),), context=torch.no_grad, name="MLP")


def perceptron_of_any_batch(device: torch.device) -> Program:
    """Two small layers compiled for any batch size, which is then an input."""
    program = perceptron(device)
    torch._dynamo.mark_dynamic(program.args[0], 0)
    return dataclasses.replace(program, name="MLP-N")


def actor_critic(device: torch.device) -> Program:
    """An actor and a critic of two hidden layers each; the observations arrive on the CPU."""

    def hidden(outputs: int) -> torch.nn.Module:
        layers = torch.nn.Linear(64, 256), torch.nn.Tanh(), torch.nn.Linear(256, 256), torch.nn.Tanh()
        return torch.nn.Sequential(*layers, torch.nn.Linear(256, outputs)).to(device)

    torch.manual_seed(0)
    actor, critic = hidden(8), hidden(1)

    def fn(observations: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        there = observations.to(device)
        return actor(there), critic(there)

    return Program(fn, (torch.randn(32, 64),), context=torch.no_grad, name="ACTOR")


PROGRAMS: dict[str, Callable[[torch.device], Program]] = {
    "MLP": perceptron,
    "MLP-N": perceptron_of_any_batch,
    "ACTOR": actor_critic,
}


def program_of(name: str) -> Program:
    """A small program or a workload, on the GPU."""
    device = torch.device("cuda")
    return PROGRAMS[name](device) if name in PROGRAMS else resolve(name, device)
