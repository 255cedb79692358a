"""LCNet from timm, half as wide as its base (lcnet_050): image classification.

1000 classes, and 1.9 million parameters. Weights and images of 224x224 are random, in float32 under bfloat16 autocast.
"""

from __future__ import annotations

import torch

from pygraph_trees.benchmark.program import Program

from .registry import inference, seeded, workload


@workload("LCNET", mode="inference", batch=256)
def build(device: torch.device | str, *, batch: int = 256, size: int = 224) -> Program:
    """LCNet 0.5 image classification"""
    from timm import create_model

    with seeded(device):
        model = create_model("lcnet_050", pretrained=False).eval()
        images = torch.randn(batch, 3, size, size)
    return Program(model, (images,), context=inference(device), name="LCNET", batch=batch)
