"""A deep autoencoder for recommendations: a user's ratings in, all ratings of that user out.

Our own definition after "Training Deep AutoEncoders for Collaborative Filtering" (arXiv 1708.01715) and NVIDIA's
DeepRecommender: encoder 197951-512-512-1024, mirrored decoder, SELU, dropout on the code; 204.5 million parameters.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import nn
from torch.nn import functional as F

from .registry import DROPS_NOTHING, Made, workload

ITEMS = 197951


class Autoencoder(nn.Module):
    """Ratings [batch, items] to ratings [batch, items]."""

    def __init__(self, items: int, hidden: Sequence[int] = (512, 512, 1024), dropout: float = DROPS_NOTHING) -> None:
        super().__init__()
        sizes = [items, *hidden]
        self.encoder = _layers(sizes)
        self.dropout = nn.Dropout(dropout)
        self.decoder = _layers(sizes[::-1])

    def forward(self, ratings: torch.Tensor) -> torch.Tensor:
        code = ratings
        for layer in self.encoder:
            code = F.selu(layer(code))
        code = self.dropout(code)
        for layer in self.decoder:
            code = F.selu(layer(code))
        return code


def _layers(sizes: Sequence[int]) -> nn.ModuleList:
    return nn.ModuleList(nn.Linear(n, m) for n, m in itertools.pairwise(sizes))


class RatingLoss(nn.Module):
    """Mean squared error of the reconstruction over the ratings that are not zero."""

    def __init__(self, model: Autoencoder) -> None:
        super().__init__()
        self.model = model

    def forward(self, ratings: torch.Tensor) -> dict[str, torch.Tensor]:
        exists = (ratings != 0).float()
        squared = F.mse_loss(self.model(ratings).float() * exists, ratings, reduction="sum")
        return {"loss": squared / exists.sum().clamp(min=1)}


@workload("DR-I", mode="inference", batch=8192)
def build_inference(*, batch: int = 8192, items: int = ITEMS) -> Made:
    """Deep recommender autoencoder, 197951 items"""
    model = Autoencoder(items).eval()
    ratings = torch.randn(batch, items)
    return model, (ratings,)


@workload("DR-T", mode="training", batch=256)
def build_training(*, batch: int = 256, items: int = ITEMS) -> Made:
    """Deep recommender autoencoder, 197951 items, training step"""
    model = RatingLoss(Autoencoder(items)).train()
    ratings = torch.randint(1, 6, (batch, items)).float() * (torch.rand(batch, items) < 0.01)
    return model, (ratings,)
