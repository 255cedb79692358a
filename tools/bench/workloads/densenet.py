"""DenseNet-121 from torchvision: image classification at 224x224.

Four blocks of 6, 12, 24 and 16 layers that add 32 channels each, after 64 of the first convolution; 1000 classes, 8.0
million parameters. Weights and images are random, in float32 under bfloat16 autocast.
"""

from __future__ import annotations

import torch

from .registry import Made, workload


@workload("DNET", mode="inference", batch=64)
def build(*, batch: int = 64, size: int = 224) -> Made:
    """DenseNet-121 image classification"""
    from torchvision.models import densenet121

    model = densenet121(weights=None).eval()
    return model, (torch.randn(batch, 3, size, size),)
