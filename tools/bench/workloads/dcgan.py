"""The discriminator of DCGAN in training: a step on images of 64x64.

Our own definition, after arXiv 1511.06434; 2.8 million parameters. As in torchbench's DCGAN there is no generator: the
images are random and all count as real. The sigmoid is part of the loss, as autocast requires.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from .registry import Made, workload

_SLOPE, _DEVIATION = 0.2, 0.02


class Discriminator(nn.Module):
    """Images [batch, 3, 64, 64] and labels, 1 for real, to a loss."""

    def __init__(self, width: int) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Conv2d(3, width, 4, 2, 1, bias=False), nn.LeakyReLU(_SLOPE, inplace=True)]
        for n in (width, 2 * width, 4 * width):
            layers += [nn.Conv2d(n, 2 * n, 4, 2, 1, bias=False), nn.BatchNorm2d(2 * n), nn.LeakyReLU(_SLOPE, True)]
        self.layers = nn.Sequential(*layers, nn.Conv2d(8 * width, 1, 4, bias=False))
        for layer in self.layers:
            if isinstance(layer, nn.Conv2d):
                nn.init.normal_(layer.weight, 0.0, _DEVIATION)
            elif isinstance(layer, nn.BatchNorm2d):
                nn.init.normal_(layer.weight, 1.0, _DEVIATION)

    def forward(self, images: torch.Tensor, real: torch.Tensor) -> dict[str, torch.Tensor]:
        scores = self.layers(images).flatten()
        return {"loss": F.binary_cross_entropy_with_logits(scores.float(), real)}


@workload("DCGAN", mode="training", batch=32)
def build(*, batch: int = 32, width: int = 64) -> Made:
    """DCGAN's discriminator, training step, images of 64x64"""
    model = Discriminator(width).train()
    images, real = torch.randn(batch, 3, 64, 64), torch.ones(batch)
    return model, (images, real)
