"""CLIP after torchmultimodal: ViT-B/16 for images, 12 layers of 512 for text, both into 512.

Our own definition with the sizes of ``clip_vit_b16``: images of 224x224 in patches of 16x16, texts of 77 tokens; 149.6
million parameters. The outputs are embeddings of length one; there is no loss. README.md lists differences.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from .registry import Made, workload


class _Layers(nn.Module):
    """Transformer layers with the norm first."""

    def __init__(self, width: int, heads: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, heads, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
            )
            for _ in range(layers)
        )

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, src_mask=mask)
        return x


class _Images(nn.Module):
    def __init__(self, size: int, patch: int, width: int, heads: int, layers: int, features: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch, bias=False)
        self.first = nn.Parameter(torch.randn(width) * width**-0.5)
        self.positions = nn.Parameter(torch.randn((size // patch) ** 2 + 1, width) * width**-0.5)
        self.before, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
        self.layers = _Layers(width, heads, layers)
        self.projection = nn.Parameter(torch.randn(width, features) * width**-0.5)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.first.expand(x.shape[0], 1, -1).to(x.dtype), x], 1) + self.positions
        return self.after(self.layers(self.before(x))[:, 0]) @ self.projection


class _Texts(nn.Module):
    def __init__(self, length: int, vocabulary: int, width: int, heads: int, layers: int, features: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(torch.randn(length, width) * 0.01)
        self.layers = _Layers(width, heads, layers)
        self.norm = nn.LayerNorm(width)
        self.projection = nn.Linear(width, features, bias=False)
        self.mask = torch.full((length, length), float("-inf"), device="cpu").triu(1)  # no buffer: it stays on the CPU

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.positions
        x = self.norm(self.layers(x, self.mask.to(x.device)))
        return self.projection(x[torch.arange(x.shape[0]), tokens.argmax(-1)])


class _Clip(nn.Module):
    def __init__(self, images: _Images, texts: _Texts) -> None:
        super().__init__()
        self.images, self.texts = images, texts

    def forward(self, images: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        texts = self.texts(tokens.to(images.device))
        return F.normalize(self.images(images), dim=-1), F.normalize(texts, dim=-1)


@workload("MMC", mode="inference", batch=1)
def build(*, batch: int = 1, size: int = 224, layers: int = 12, width: int = 768) -> Made:
    """CLIP ViT-B/16, an image and a text of 77 tokens, which come from the CPU"""
    text_width, features, length, vocabulary = width * 2 // 3, width * 2 // 3, 77, 49408
    images = _Images(size, 16, width, width // 64, layers, features)
    texts = _Texts(length, vocabulary, text_width, max(1, text_width // 64), layers, features)
    model = _Clip(images, texts).eval()
    picture = torch.randn(batch, 3, size, size)
    tokens = torch.randint(vocabulary, (batch, length), device="cpu")
    return model, (picture, tokens)
