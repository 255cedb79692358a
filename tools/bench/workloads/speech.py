"""Speech-Transformer (kaituoxu/Speech-Transformer): 6 layers of 512 in the encoder and the decoder, 4233 characters.

Our own definition: 8 heads, 2048 between the layers, 46.5 million parameters. The input is 256 frames of 320 features,
with lengths on the CPU, and 24 characters. README.md lists differences.
"""

from __future__ import annotations

import math

import torch
from torch import nn

from .registry import Made, workload

_START = 2  # the character with which a target begins


class _Attention(nn.Module):
    """Heads over ``width``, with the norm after the sum."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.norm = nn.LayerNorm(width)

    def forward(self, x: torch.Tensor, source: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """``mask`` is true at keys of ``source`` that a query of ``x`` must not see."""
        q, k, v = (
            layer(t).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for layer, t in ((self.query, x), (self.key, source), (self.value, source))
        )
        scores = (q @ k.mT / math.sqrt(q.shape[-1])).masked_fill(mask[:, None], float("-inf"))
        found = (scores.softmax(-1) @ v).transpose(1, 2).flatten(-2)
        return self.norm(self.out(found) + x)


class _Layer(nn.Module):
    def __init__(self, width: int, heads: int, reads_source: bool) -> None:
        super().__init__()
        self.own = _Attention(width, heads)
        self.other = _Attention(width, heads) if reads_source else None
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norm = nn.LayerNorm(width)

    def forward(
        self,
        x: torch.Tensor,
        is_there: torch.Tensor,
        mask: torch.Tensor,
        source: torch.Tensor | None = None,
        source_mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        x = self.own(x, x, mask) * is_there
        if self.other is not None:
            assert source is not None and source_mask is not None
            x = self.other(x, source, source_mask) * is_there
        return self.norm(self.narrow(self.wide(x).relu()) + x) * is_there


class _SpeechTransformer(nn.Module):
    def __init__(self, features: int, width: int, layers: int, vocabulary: int, most: int) -> None:
        super().__init__()
        heads = max(1, width // 64)
        self.features, self.norm = nn.Linear(features, width), nn.LayerNorm(width)
        angles = torch.arange(most)[:, None] * torch.exp(torch.arange(0, width, 2) * -(math.log(10000.0) / width))
        self.register_buffer("positions", torch.stack([angles.sin(), angles.cos()], -1).flatten(1))
        self.characters = nn.Embedding(vocabulary, width)
        self.encoder = nn.ModuleList(_Layer(width, heads, reads_source=False) for _ in range(layers))
        self.decoder = nn.ModuleList(_Layer(width, heads, reads_source=True) for _ in range(layers))
        self.scale = width**-0.5

    def forward(self, sounds: torch.Tensor, lengths: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Scores of the characters, from sounds (batch, time, features) whose lengths are on the CPU."""
        is_there = (torch.arange(sounds.shape[1]) < lengths[:, None]).to(sounds.device)
        x = self.norm(self.features(sounds)) + self.positions[: sounds.shape[1]]
        for layer in self.encoder:
            x = layer(x, is_there[..., None], ~is_there[:, None].expand(-1, sounds.shape[1], -1))
        said = torch.cat([torch.full((target.shape[0], 1), _START, device=target.device), target[:, :-1]], 1)
        count = said.shape[1]
        later = torch.ones(count, count, dtype=torch.bool).triu(1).to(sounds.device)
        y = self.characters(said) / self.scale + self.positions[:count]
        some = torch.ones_like(said, dtype=torch.bool)[..., None]
        for layer in self.decoder:
            y = layer(y, some, later.expand(said.shape[0], -1, -1), x, ~is_there[:, None].expand(-1, count, -1))
        return (y @ self.characters.weight.mT) * self.scale


@workload("ST", mode="inference", batch=1)
def build(*, batch: int = 1, time: int = 256, count: int = 24, layers: int = 6, width: int = 512) -> Made:
    """Speech-Transformer, 256 frames and 24 characters, with lengths from the CPU"""
    features, vocabulary = 320, 4233
    model = _SpeechTransformer(features, width, layers, vocabulary, most=2 * time).eval()
    sounds = torch.randn(batch, time, features)
    target = torch.randint(vocabulary, (batch, count))
    lengths = torch.randint(time // 2, time + 1, (batch,), device="cpu")
    return model, (sounds, lengths, target)
