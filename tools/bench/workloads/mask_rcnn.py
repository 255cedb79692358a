"""Mask R-CNN with ResNet-50 and a feature pyramid, from torchvision: an image of 800x800.

What it does depends on its data: it keeps the boxes that pass thresholds, and a mask is made for each that is left. So
there are many graphs, with sizes that differ, and code between them. Its weights are random, hence two of them are
scaled: the last norm of each residual block (by 0.2), as without statistics of training the features would grow with
each block, and the layer of the class scores (by 20), as else no score would pass the threshold. 100 objects are found,
the most that it gives; which ones may hang on the last bit of a score.

91 classes, 44.5 million parameters, in float32 under bfloat16 autocast; the image is random. Differences from the model
with trained weights: its norms are batch norms, where torchvision freezes those of a trained one; and the longer side
of an image is 800 at most, there 1333.
"""

from __future__ import annotations

import torch

from pygraph_trees.benchmark.program import Program

from .registry import inference, seeded, workload


@workload("VM", mode="inference", batch=1)
def build(device: torch.device | str, *, batch: int = 1, size: int = 800) -> Program:
    """Mask R-CNN ResNet-50 FPN, an image of 800x800"""
    from torchvision.models.detection import maskrcnn_resnet50_fpn

    with seeded(device), torch.no_grad():
        model = maskrcnn_resnet50_fpn(weights=None, weights_backbone=None, min_size=size, max_size=size).eval()
        for name, norm in model.backbone.named_modules():
            if name.endswith(".bn3"):
                norm.weight *= 0.2
        model.roi_heads.box_predictor.cls_score.weight *= 20
        images = [torch.rand(3, size, size) for _ in range(batch)]
    return Program(model, (images,), context=inference(device), name="VM", batch=batch)
