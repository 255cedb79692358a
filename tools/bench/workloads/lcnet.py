"""LCNet from timm, half as wide as its base (lcnet_050): image classification.

1000 classes, and 1.9 million parameters. Weights and images of 224x224 are random, in float32 under bfloat16 autocast.
"""

from __future__ import annotations

import torch

from .registry import Made, workload


@workload("LCNET", mode="inference", batch=256)
def build(*, batch: int = 256, size: int = 224) -> Made:
    """LCNet 0.5 image classification"""
    from timm import create_model

    model = create_model("lcnet_050", pretrained=False).eval()
    return model, (torch.randn(batch, 3, size, size),)
