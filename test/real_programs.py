"""Five realistic programs. Each one passes a CPU value to the GPU at each call.

Functions return ``(callable, arguments)``, so that ``python -m pygraph_trees compare test/real_programs.py:tokens``
measures it. ``small`` makes one for tests.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy
import torch
from torch import nn

Program = tuple[Callable[..., Any], tuple[torch.Tensor, ...]]


class _Window(nn.Module):
    """Attention in a window of patches with a bias for each pair's distance, as in Swin."""

    def __init__(self, width: int, side: int) -> None:
        super().__init__()
        self.heads = width // 32
        self.inward, self.outward = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.bias = nn.Parameter(torch.randn((2 * side - 1) ** 2, self.heads))
        place = torch.stack(torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")).flatten(1)
        apart = place[:, :, None] - place[:, None] + side - 1
        self.distances = apart[0] * (2 * side - 1) + apart[1]  # a plain attribute, which stays on the CPU

    def forward(self, x):
        count, length, width = x.shape
        q, k, v = self.inward(x).view(count, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        bias = self.bias[self.distances.to(x.device).view(-1)].view(length, length, -1).permute(2, 0, 1)
        scores = (q @ k.mT / (width // self.heads) ** 0.5 + bias).softmax(-1)
        return x + self.outward((scores @ v).transpose(1, 2).reshape(count, length, width))


def relative_positions(device: torch.device | str = "cuda", *, small: bool = False) -> Program:
    """Windows of patches, whose table of relative positions is on the CPU."""
    width, side = (32, 4) if small else (384, 12)
    torch.manual_seed(0)
    layers = nn.Sequential(*[_Window(width, side) for _ in range(1 if small else 4)]).to(device).eval()

    def encode(x):
        with torch.no_grad():
            return layers(x)

    return encode, (torch.randn(4, side * side, width).to(device),)


class _Denoiser(nn.Module):
    """Adds scheduled noise to images and predicts it, as diffusers' training loops do."""

    def __init__(self, channels: int, layers: int) -> None:
        super().__init__()
        self.inward = nn.Conv2d(3, channels, 3, padding=1)
        self.middle = nn.Sequential(*[nn.Conv2d(channels, channels, 3, padding=1) for _ in range(layers)])
        self.outward = nn.Conv2d(channels, 3, 3, padding=1)
        betas = torch.linspace(0.0001, 0.02, 1000)
        self.alphas_cumprod = (1.0 - betas).cumprod(0)  # a plain attribute, which stays on the CPU

    def forward(self, images, noise, steps):
        alpha = self.alphas_cumprod[steps].view(-1, 1, 1, 1)
        kept = alpha.sqrt().to(images.device)
        added = (1 - alpha).sqrt().to(images.device)
        noisy = kept * images + added * noise
        return self.outward(torch.relu(self.middle(torch.relu(self.inward(noisy))))) - noise


def noise_schedule(device: torch.device | str = "cuda", *, small: bool = False) -> Program:
    """A noise schedule on the CPU, looked up at a step for each image; the steps are drawn on the CPU."""
    torch.manual_seed(0)
    model = _Denoiser(*((8, 1) if small else (64, 4))).to(device).eval()
    images, noise = (
        torch.randn(1, 3, 16, 16).to(device) if small else torch.randn(4, 3, 64, 64).to(device) for _ in "ab"
    )

    def predict(images, noise, steps):
        with torch.no_grad():
            return model(images, noise, steps)

    return predict, (images, noise, torch.randint(1000, (len(images),)))


def mask_of_lengths(device: torch.device | str = "cuda", *, small: bool = False) -> Program:
    """A text encoder whose masks, causal and for each text's length, are built on the CPU at each call."""
    width, length = (32, 8) if small else (512, 77)
    torch.manual_seed(0)
    layers = nn.ModuleList(
        nn.MultiheadAttention(width, width // 32, batch_first=True) for _ in range(1 if small else 2)
    )
    layers.to(device).eval()
    text = torch.randn(2, length, width).to(device)

    def encode(text, lengths):
        causal = torch.empty(length, length).fill_(torch.finfo(torch.float32).min).triu(1)
        padding = torch.zeros(len(lengths), length).masked_fill(torch.arange(length) >= lengths[:, None], -1e9)
        causal, padding = causal.to(text.device), padding.to(text.device)
        with torch.no_grad():
            for layer in layers:
                text = text + layer(text, text, text, padding, need_weights=False, attn_mask=causal)[0]
        return text

    return encode, (text, torch.tensor([length, length // 2]))


def _sincos(width: int, side: int) -> numpy.ndarray[Any, Any]:
    """Sine and cosine positions of a square of patches, as in masked autoencoders."""
    frequencies = 1.0 / 10000 ** (numpy.arange(width // 4) / (width / 4.0))
    rows, columns = numpy.meshgrid(numpy.arange(side), numpy.arange(side), indexing="ij")
    parts = [f(place.reshape(-1)[:, None] * frequencies) for place in (rows, columns) for f in (numpy.sin, numpy.cos)]
    return numpy.concatenate(parts, axis=1).astype(numpy.float32)


def numpy_positions(device: torch.device | str = "cuda", *, small: bool = False) -> Program:
    """A vision transformer whose positions are a NumPy array."""
    width, side = (32, 4) if small else (384, 14)
    torch.manual_seed(0)
    patches = nn.Conv2d(3, width, 16, 16).to(device)
    layer = nn.TransformerEncoderLayer(width, width // 32, 4 * width, batch_first=True).to(device).eval()
    positions = _sincos(width, side)
    images = torch.randn(2, 3, 16 * side, 16 * side).to(device)

    def encode(images):
        with torch.no_grad():
            tokens = patches(images).flatten(2).transpose(1, 2)
            return layer(tokens + torch.from_numpy(positions).to(images.device))

    return encode, (images,)


def tokens(device: torch.device | str = "cuda", *, small: bool = False) -> Program:
    """BERT of transformers, with the ids and the mask on the CPU, where its tokenizer makes them."""
    from transformers import BertConfig, BertModel

    width = 64 if small else 768
    config = BertConfig(
        vocab_size=1000,
        hidden_size=width,
        num_hidden_layers=1 if small else 2,
        num_attention_heads=width // 32,
        intermediate_size=2 * width,
    )
    torch.manual_seed(0)
    model = BertModel(config, add_pooling_layer=False).to(device).eval()
    ids = torch.randint(1000, (1, 16 if small else 128))

    def encode(ids, mask):
        where = model.embeddings.word_embeddings.weight.device
        with torch.no_grad():
            return model(input_ids=ids.to(where), attention_mask=mask.to(where)).last_hidden_state

    return encode, (ids, torch.ones_like(ids))


REAL = (relative_positions, noise_schedule, mask_of_lengths, numpy_positions, tokens)
