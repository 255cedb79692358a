"""The models of the training loops, and how a step trains each of them.

A model is a list of :class:`Update` records, each with losses to minimize and an optimizer. Batches are numbered from 0
and taken from four sets of tensors in turn. Only the initial values are random, so eager gives the same gradients.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

BATCHES = 4
RATE = 1e-4  # small, so that gradients of later steps stay comparable

Losses = Callable[[int], tuple[torch.Tensor, ...]]  # of the batch with this number
Compile = Callable[[Any], Any]  # compiles a module or a function


@dataclass(frozen=True, slots=True)
class Update:
    """One update of a step: losses, whose sum is differentiated, and an optimizer."""

    losses: Losses  # compiled
    plain: Losses  # the same, not compiled
    parameters: Sequence[nn.Parameter]
    optimizer: torch.optim.Optimizer
    after: Callable[[], object]  # what the program does after the optimizer's step


Make = Callable[[torch.device, bool, Compile], list[Update]]  # the second argument: whether to make a small model


def _update(
    losses: Callable[[Any, int], tuple[torch.Tensor, ...]],
    fn: Any,
    compiled: Compile,
    parameters: Sequence[nn.Parameter],
    after: Callable[[], object] = lambda: None,
) -> Update:
    """An update by losses that call ``fn``, a module or a function, compiled or not."""
    ways = (functools.partial(losses, call) for call in (compiled(fn), fn))
    return Update(*ways, parameters, torch.optim.SGD(parameters, RATE, foreach=True), after)


def bert(device: torch.device, is_small: bool, compiled: Compile) -> list[Update]:
    """BERT-base without dropout, batch 4, 128 tokens; the model computes its loss."""
    from transformers import BertConfig, BertForMaskedLM

    size = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_hidden_layers": 1}
    config = BertConfig(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **(size if is_small else {}))
    model = BertForMaskedLM(config).to(device).train()
    tokens = torch.randint(5, config.vocab_size, (BATCHES, 4, 128), device=device).unbind()

    def losses(call: Any, number: int) -> tuple[torch.Tensor, ...]:
        return (call(input_ids=tokens[number % BATCHES], labels=tokens[(number + 1) % BATCHES]).loss,)

    return [_update(losses, model, compiled, list(model.parameters()))]


def vit(device: torch.device, is_small: bool, compiled: Compile) -> list[Update]:
    """ViT-tiny, batch 8; the loss is not compiled."""
    import timm

    model = timm.create_model("vit_tiny_patch16_224", num_classes=10, depth=1 if is_small else 12)
    return _classifier(model, (8, 3, 224, 224), 10, device, compiled)


def resnet(device: torch.device, is_small: bool, compiled: Compile) -> list[Update]:
    """ResNet-18, batch 16; the loss is not compiled."""
    import torchvision

    size = 64 if is_small else 224
    return _classifier(torchvision.models.resnet18(), (16, 3, size, size), 1000, device, compiled)


def mlp(device: torch.device, is_small: bool, compiled: Compile) -> list[Update]:
    """Four layers of 256 and one of 10, batch 64; the loss is not compiled."""
    width = 32 if is_small else 256
    hidden = [module for _ in range(4) for module in (nn.Linear(width, width), nn.GELU())]
    return _classifier(nn.Sequential(*hidden, nn.Linear(width, 10)), (64, width), 10, device, compiled)


def _classifier(
    model: nn.Module, shape: tuple[int, ...], classes: int, device: torch.device, compiled: Compile
) -> list[Update]:
    model = model.to(device).train()
    inputs = torch.randn(BATCHES, *shape, device=device).unbind()
    labels = torch.randint(classes, (BATCHES, shape[0]), device=device).unbind()

    def losses(call: Any, number: int) -> tuple[torch.Tensor, ...]:
        return (F.cross_entropy(call(inputs[number % BATCHES]), labels[number % BATCHES]),)

    return [_update(losses, model, compiled, list(model.parameters()))]


class Actor(nn.Module):
    """A policy that draws actions between -1 and 1 from given noise, with the logarithms of their probabilities."""

    def __init__(self, states: int, actions: int, hidden: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(states, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU())
        self.mean, self.log_std = nn.Linear(hidden, actions), nn.Linear(hidden, actions)

    def forward(self, states: torch.Tensor, noise: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.body(states)
        log_std = self.log_std(hidden).clamp(-5, 2)
        actions = (self.mean(hidden) + log_std.exp() * noise).tanh()
        log_probabilities = -0.5 * noise.square() - log_std - (1 - actions.square() + 1e-6).log()
        return actions, log_probabilities.sum(-1)


class Critic(nn.Module):
    """The value of actions in states."""

    def __init__(self, states: int, actions: int, hidden: int) -> None:
        super().__init__()
        layers = nn.Linear(states + actions, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU()
        self.layers = nn.Sequential(*layers, nn.Linear(hidden, 1))

    def forward(self, states: torch.Tensor, actions: torch.Tensor) -> torch.Tensor:
        return self.layers(torch.cat((states, actions), -1)).squeeze(-1)


def actor_critic(device: torch.device, is_small: bool, compiled: Compile) -> list[Update]:
    """An actor with twin critics, as in SAC: 17 states, 6 actions, layers of 256, batch 256.

    Each of two compiled functions computes the losses of an update. The targets follow the critics after their step.
    """
    sizes, rows = (17, 6, 32 if is_small else 256), 256
    actor = Actor(*sizes).to(device)
    critics, targets = ([Critic(*sizes).to(device) for _ in range(2)] for _ in range(2))
    for critic, target in zip(critics, targets, strict=True):
        target.load_state_dict(critic.state_dict())
    of_critics, of_targets = ([p for module in modules for p in module.parameters()] for modules in (critics, targets))
    states, next_states = (torch.randn(BATCHES, rows, sizes[0], device=device).unbind() for _ in range(2))
    actions = torch.rand(BATCHES, rows, sizes[1], device=device).mul(2).sub(1).unbind()
    noise, next_noise = (torch.randn(BATCHES, rows, sizes[1], device=device).unbind() for _ in range(2))
    rewards = torch.randn(BATCHES, rows, device=device).unbind()
    temperature, discount = 0.2, 0.99

    def losses_of_critics(
        states: torch.Tensor,
        actions: torch.Tensor,
        rewards: torch.Tensor,
        next_states: torch.Tensor,
        next_noise: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        with torch.no_grad():
            next_actions, log_probabilities = actor(next_states, next_noise)
            first, second = (target(next_states, next_actions) for target in targets)
            wanted = rewards + discount * (torch.min(first, second) - temperature * log_probabilities)
        return tuple(F.mse_loss(critic(states, actions), wanted) for critic in critics)

    def loss_of_actor(states: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        drawn, log_probabilities = actor(states, noise)
        first, second = (critic(states, drawn) for critic in critics)
        return (temperature * log_probabilities - torch.min(first, second)).mean()

    def train_critics(call: Any, number: int) -> tuple[torch.Tensor, ...]:
        k = number % BATCHES
        return call(states[k], actions[k], rewards[k], next_states[k], next_noise[k])

    def train_actor(call: Any, number: int) -> tuple[torch.Tensor, ...]:
        k = number % BATCHES
        for parameter in of_critics:
            parameter.requires_grad_(False)
        loss = call(states[k], noise[k])
        for parameter in of_critics:
            parameter.requires_grad_(True)
        return (loss,)

    @torch.no_grad()
    def follow() -> None:
        torch._foreach_lerp_(of_targets, of_critics, 0.005)

    return [
        _update(train_critics, losses_of_critics, compiled, of_critics, follow),
        _update(train_actor, loss_of_actor, compiled, list(actor.parameters())),
    ]


MODELS: dict[str, Make] = {"bert": bert, "vit": vit, "resnet": resnet, "mlp": mlp, "sac": actor_critic}
TITLES = {
    "bert": "BERT, batch 4, 128 tokens",
    "vit": "ViT-tiny, batch 8",
    "resnet": "ResNet-18, batch 16",
    "mlp": "MLP, 4 layers of 256, batch 64",
    "sac": "actor and twin critics (SAC), layers of 256, batch 256",
}
