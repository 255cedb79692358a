"""DenseNet-121 from torchvision: image classification at 224x224.

Four blocks of 6, 12, 24 and 16 layers that add 32 channels each, after 64 of the first convolution; 1000 classes, 8.0
million parameters. Weights and images are random, in float32 under bfloat16 autocast.
"""

from __future__ import annotations

import torch

from pygraph_trees.benchmark.program import Program

from .registry import inference, seeded, workload


@workload("DNET", mode="inference", batch=64)
def build(device: torch.device | str, *, batch: int = 64, size: int = 224) -> Program:
    """DenseNet-121 image classification"""
    from torchvision.models import densenet121

    with seeded(device):
        model = densenet121(weights=None).eval()
        images = torch.randn(batch, 3, size, size)
    return Program(model, (images,), context=inference(device), name="DNET", batch=batch)
