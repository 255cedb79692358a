"""Mask R-CNN with ResNet-50 and a feature pyramid, from torchvision: an image of 800x800.

Its work depends on its data: it keeps the boxes that pass thresholds and makes a mask for each. So it has many graphs
of different sizes, with code in between. 91 classes, 44.5 million parameters. README.md lists differences.
"""

from __future__ import annotations

import torch
from torch import nn

from .registry import Made, workload


class _Float32Masks(nn.Module):
    """Makes masks float32 in all ways: under autocast, they are float32 with eager and bfloat16 with torch.compile."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: list[torch.Tensor]) -> list[dict[str, torch.Tensor]]:
        return [{**found, "masks": found["masks"].float()} for found in self.model(images)]


@workload("VM", mode="inference", batch=1)
def build(*, batch: int = 1, size: int = 800) -> Made:
    """Mask R-CNN ResNet-50 FPN, an image of 800x800"""
    from torchvision.models.detection import maskrcnn_resnet50_fpn

    with torch.no_grad():
        model = maskrcnn_resnet50_fpn(weights=None, weights_backbone=None, min_size=size, max_size=size).eval()
        for name, norm in model.backbone.named_modules():
            if name.endswith(".bn3"):
                norm.weight *= 0.2
        model.roi_heads.box_predictor.cls_score.weight *= 20
        images = [torch.rand(3, size, size) for _ in range(batch)]
    return _Float32Masks(model), (images,)
