"""DLRM: click prediction from dense features and bags of categories.

Our own definition, after "Deep Learning Recommendation Model for Personalization and Recommendation Systems" (arXiv
1906.00091); 1.67 billion parameters, 6.7 GB, 28 live inputs. README.md gives the sizes and their sources.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import nn

from .registry import Made, workload

BAGS = (3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1)  # indices, by feature
FEATURES = len(BAGS)
WIDTH = 64
DENSE = 512


class Dlrm(nn.Module):
    """Dense features [batch, 512], offsets [features, batch], indices for each feature; returns chances [batch, 1]."""

    def __init__(self, rows: int, features: int = FEATURES) -> None:
        super().__init__()
        self.bottom = _mlp([DENSE, 512, 512, WIDTH])
        self.tables = nn.ModuleList(nn.EmbeddingBag(rows, WIDTH, mode="sum") for _ in range(features))
        vectors = features + 1
        pairs = list(itertools.combinations(range(vectors), 2))
        self.register_buffer("first", torch.tensor([i for i, _ in pairs]))
        self.register_buffer("second", torch.tensor([j for _, j in pairs]))
        self.top = _mlp([WIDTH + len(pairs), 1024, 1024, 1024])
        self.click = nn.Linear(1024, 1)

    def forward(self, dense: torch.Tensor, offsets: torch.Tensor, *indices: torch.Tensor) -> torch.Tensor:
        x = self.bottom(dense)
        bags = [table(i, offsets[n]) for n, (table, i) in enumerate(zip(self.tables, indices, strict=True))]
        vectors = torch.stack([x, *(bag.to(x.dtype) for bag in bags)], dim=1)
        products = torch.bmm(vectors, vectors.transpose(1, 2))[:, self.first, self.second]
        return torch.sigmoid(self.click(self.top(torch.cat([x, products.to(x.dtype)], dim=1))))


def _mlp(sizes: Sequence[int]) -> nn.Sequential:
    layers: list[nn.Module] = []
    for n, m in itertools.pairwise(sizes):
        layers += [nn.Linear(n, m), nn.ReLU()]
    return nn.Sequential(*layers)


@workload("DLRM", mode="inference", batch=2048)
def build(*, batch: int = 2048, rows: int = 1_000_000, features: int = FEATURES) -> Made:
    """DLRM click prediction, 26 bags of 1 to 100 categories and 512 dense features"""
    model = Dlrm(rows, features).eval()
    dense, offsets = torch.rand(batch, DENSE), torch.tensor(BAGS[:features])[:, None] * torch.arange(batch)
    indices = [torch.randint(rows, (length * batch,)) for length in BAGS[:features]]
    return model, (dense, offsets, *indices)
