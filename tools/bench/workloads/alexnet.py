"""AlexNet, from torchvision if that can be imported, otherwise our own definition of the same network.

The network is that of "One weird trick for parallelizing convolutional neural networks" (arXiv 1404.5997), with 1000
classes, 61.1 million parameters and images of 224x224. Dropout does nothing in inference.
"""

from __future__ import annotations

import torch
from torch import nn

from .registry import Made, workload


class AlexNet(nn.Module):
    """Images of 224x224 or more to 1000 class scores."""

    def __init__(self, classes: int = 1000) -> None:
        super().__init__()
        convolutions: list[nn.Module] = []
        channels = 3
        # Output channels, kernel, stride, padding, and whether a pooling follows.
        for out, kernel, stride, padding, pool in (
            (64, 11, 4, 2, True),
            (192, 5, 1, 2, True),
            (384, 3, 1, 1, False),
            (256, 3, 1, 1, False),
            (256, 3, 1, 1, True),
        ):
            convolutions += [nn.Conv2d(channels, out, kernel, stride, padding), nn.ReLU(inplace=True)]
            convolutions += [nn.MaxPool2d(3, 2)] if pool else []
            channels = out
        self.features = nn.Sequential(*convolutions)
        self.pool = nn.AdaptiveAvgPool2d(6)
        self.classifier = nn.Sequential(
            nn.Dropout(),
            nn.Linear(channels * 36, 4096),
            nn.ReLU(inplace=True),
            nn.Dropout(),
            nn.Linear(4096, 4096),
            nn.ReLU(inplace=True),
            nn.Linear(4096, classes),
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.classifier(self.pool(self.features(images)).flatten(1))


def _model() -> nn.Module:
    try:
        from torchvision.models import alexnet  # type: ignore[import-not-found,unused-ignore]
    except Exception:  # a torchvision of another torch version raises more than ImportError
        return AlexNet()
    return alexnet(weights=None)


@workload("ALNET", mode="inference", batch=2)
def build(*, batch: int = 2) -> Made:
    """AlexNet image classification"""
    model = _model().eval()
    return model, (torch.randn(batch, 3, 224, 224),)
