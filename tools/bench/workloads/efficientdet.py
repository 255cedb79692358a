"""EfficientDet-D1 in training, on timm's EfficientNet-B1: an image of 640x640 and the boxes in it.

Our own definition around that backbone, after "EfficientDet: Scalable and Efficient Object Detection" (arXiv
1911.09070); 6.6 million parameters. As in effdet's training benchmark, each step assigns 16 boxes to anchors.
"""

from __future__ import annotations

import itertools
import math

import torch
from torch import nn
from torch.nn import functional as F

from .registry import Made, workload

_LEVELS = range(3, 8)
_SCALES, _RATIOS = (1.0, 2 ** (1 / 3), 2 ** (2 / 3)), (0.5, 1.0, 2.0)
_ANCHORS = len(_SCALES) * len(_RATIOS)


def _norm(channels: int) -> nn.BatchNorm2d:
    return nn.BatchNorm2d(channels, eps=1e-3, momentum=0.01)


class _Separable(nn.Sequential):
    """A depthwise convolution of 3x3, then one of 1x1."""

    def __init__(self, channels: int, out: int, bias: bool = True) -> None:
        super().__init__(
            nn.Conv2d(channels, channels, 3, padding=1, groups=channels, bias=False),
            nn.Conv2d(channels, out, 1, bias=bias),
        )


class _Fusion(nn.Module):
    """The weighted mean of maps of one size, then a separable convolution."""

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.ones(inputs))
        self.after = nn.Sequential(nn.SiLU(), _Separable(width, width), _norm(width))

    def forward(self, *maps: torch.Tensor) -> torch.Tensor:
        weights = self.weights.relu()
        shares = (weights / (weights.sum() + 1e-4)).unbind()
        return self.after(sum(share * x for share, x in zip(shares, maps, strict=True)))


class _Cell(nn.Module):
    """Five maps, finest first, to five of the same sizes: down to the finest level, then up again."""

    def __init__(self, width: int) -> None:
        super().__init__()
        count = len(_LEVELS)
        self.down = nn.ModuleList(_Fusion(2, width) for _ in range(count - 1))
        self.up = nn.ModuleList(_Fusion(2 if n == count - 2 else 3, width) for n in range(count - 1))

    def forward(self, maps: list[torch.Tensor]) -> list[torch.Tensor]:
        middle = [maps[-1]]
        for fusion, x in zip(self.down, maps[-2::-1], strict=True):
            middle.insert(0, fusion(x, F.interpolate(middle[0], size=x.shape[-2:], mode="nearest")))
        found = [middle[0]]
        for n, fusion in enumerate(self.up, 1):
            finer = F.max_pool2d(found[-1], 3, 2, 1)
            found.append(fusion(maps[n], finer) if n == len(self.up) else fusion(maps[n], middle[n], finer))
        return found


class _Head(nn.Module):
    """Maps to [batch, anchors of all levels, values]."""

    def __init__(self, width: int, depth: int, values: int, bias: float = 0.0) -> None:
        super().__init__()
        self.values = values
        self.convolutions = nn.ModuleList(_Separable(width, width) for _ in range(depth))
        self.norms = nn.ModuleList(nn.ModuleList(_norm(width) for _ in range(depth)) for _ in _LEVELS)
        self.last = _Separable(width, _ANCHORS * values)
        nn.init.constant_(self.last[1].bias, bias)

    def forward(self, maps: list[torch.Tensor]) -> torch.Tensor:
        found = []
        for x, norms in zip(maps, self.norms, strict=True):
            for convolution, norm in zip(self.convolutions, norms, strict=True):
                x = F.silu(norm(convolution(x)))
            found.append(self.last(x).permute(0, 2, 3, 1).reshape(x.shape[0], -1, self.values))
        return torch.cat(found, 1)


def anchors(size: int) -> torch.Tensor:
    """The anchors of an image as (centre y, centre x, height, width), in the order of a head's values."""
    levels = []
    for level in _LEVELS:
        stride = 2**level
        shapes = [
            (4 * stride * scale / math.sqrt(ratio), 4 * stride * scale * math.sqrt(ratio))
            for scale, ratio in itertools.product(_SCALES, _RATIOS)
        ]
        centres = (torch.arange(math.ceil(size / stride)) + 0.5) * stride
        places = torch.cartesian_prod(centres, centres)
        both = [places[:, None].expand(-1, _ANCHORS, -1), torch.tensor(shapes).expand(len(places), -1, -1)]
        levels.append(torch.cat(both, -1).flatten(0, 1))
    return torch.cat(levels)


class EfficientDet(nn.Module):
    """Images [batch, 3, size, size], boxes [batch, n, 4] by centre and size, and their classes [batch, n] to losses."""

    def __init__(self, backbone: nn.Module, size: int, width: int, cells: int, depth: int, classes: int) -> None:
        super().__init__()
        self.backbone = backbone
        channels = backbone.feature_info.channels()
        self.entries = nn.ModuleList(nn.Sequential(nn.Conv2d(n, width, 1), _norm(width)) for n in channels)
        self.above = nn.Sequential(nn.Conv2d(channels[-1], width, 1), _norm(width))
        self.cells = nn.ModuleList(_Cell(width) for _ in range(cells))
        self.classes = _Head(width, depth, classes, bias=-math.log((1 - 0.01) / 0.01))
        self.boxes = _Head(width, depth, 4)
        self.register_buffer("anchors", anchors(size))

    def forward(self, images: torch.Tensor, boxes: torch.Tensor, classes: torch.Tensor) -> dict[str, torch.Tensor]:
        features = self.backbone(images)
        maps = [entry(x) for entry, x in zip(self.entries, features, strict=True)]
        maps.append(F.max_pool2d(self.above(features[-1]), 3, 2, 1))
        maps.append(F.max_pool2d(maps[-1], 3, 2, 1))
        for cell in self.cells:
            maps = cell(maps)
        return self._loss(self.classes(maps).float(), self.boxes(maps).float(), boxes, classes)

    def _loss(
        self, scores: torch.Tensor, offsets: torch.Tensor, boxes: torch.Tensor, classes: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        overlap, which = _overlaps(self.anchors, boxes).max(-1)
        has_box = overlap >= 0.5
        count = has_box.sum() + 1
        own = boxes.gather(1, which[..., None].expand(-1, -1, 4))
        centre, extent = self.anchors.split(2, -1)
        wanted = torch.cat([(own[..., :2] - centre) / extent, (own[..., 2:] / extent).log()], -1)
        box_loss = (F.huber_loss(offsets, wanted, reduction="none", delta=0.1) * has_box[..., None]).sum() / (4 * count)
        target = F.one_hot(classes.gather(1, which), scores.shape[-1]) * has_box[..., None].float()
        class_loss = _focal_loss(scores, target).sum() / count
        return {"loss": class_loss + 50 * box_loss, "class_loss": class_loss, "box_loss": box_loss}


def _overlaps(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Intersection over union of boxes [n, 4] with boxes [batch, m, 4]: [batch, n, m]."""
    one, other = one[:, None], other[:, None]
    low, high = (
        limit(one[..., :2] + sign * one[..., 2:] / 2, other[..., :2] + sign * other[..., 2:] / 2)
        for limit, sign in ((torch.maximum, -1), (torch.minimum, 1))
    )
    shared = (high - low).clamp(min=0).prod(-1)
    return shared / (one[..., 2:].prod(-1) + other[..., 2:].prod(-1) - shared)


def _focal_loss(scores: torch.Tensor, target: torch.Tensor, alpha: float = 0.25, gamma: float = 1.5) -> torch.Tensor:
    plain = F.binary_cross_entropy_with_logits(scores, target, reduction="none")
    chance = scores.sigmoid()
    missed = chance + target - 2 * chance * target  # chance of the wrong answer
    return plain * missed**gamma * (alpha * target + (1 - alpha) * (1 - target))


@workload("TEFD", mode="training", batch=1)
def build(*, batch: int = 1, size: int = 640) -> Made:
    """EfficientDet-D1, training step, an image of 640x640 with 16 boxes"""
    from timm import create_model

    boxes, classes = 16, 90
    trunk = create_model("tf_efficientnet_b1", pretrained=False, features_only=True, out_indices=(2, 3, 4))
    model = EfficientDet(trunk, size, width=88, cells=4, depth=3, classes=classes).train()
    images = torch.randn(batch, 3, size, size)
    places = torch.cat([torch.rand(batch, boxes, 2), torch.rand(batch, boxes, 2) * 0.4 + 0.1], -1) * size
    kinds = torch.randint(classes, (batch, boxes))
    return model, (images, places, kinds)
