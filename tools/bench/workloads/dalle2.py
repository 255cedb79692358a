"""DALL-E 2: from a text to an image by CLIP's text encoder, one step of the prior and one step of the decoder.

Our own definition, after "Hierarchical Text-Conditional Image Generation with CLIP Latents" (arXiv 2204.06125) and
lucidrains' DALLE2-pytorch; 291 million parameters. Tokens, mask and times of steps start on the CPU.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

from .registry import Made, workload

_HEAD = 64
_STEPS = 1000  # of the whole diffusion; the workload runs one
_LENGTH, _VOCABULARY = 77, 49408


def _embedded(time: torch.Tensor, width: int) -> torch.Tensor:
    """Sines and cosines of times [batch] in ``width`` frequencies."""
    rates = torch.exp(torch.arange(width // 2, device=time.device) * -(math.log(10000) / (width // 2 - 1)))
    angles = time[:, None] * rates
    return torch.cat([angles.sin(), angles.cos()], -1)


def _kept(time: torch.Tensor) -> torch.Tensor:
    """The share of the image that is left in the noise at times [batch]: the cosine schedule, between 0 and 1."""
    return ((time / _STEPS + 0.008) / 1.008 * math.pi / 2).cos() ** 2


class _Attention(nn.Module):
    """Attention from ``x`` to a source, by default to itself."""

    def __init__(self, width: int, source: int | None = None) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.query = nn.Linear(width, width, bias=False)
        self.both = nn.Linear(source or width, 2 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(
        self, x: torch.Tensor, source: torch.Tensor | None = None, mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        x = self.norm(x)
        inputs = (self.query(x), *self.both(x if source is None else source).chunk(2, -1))
        q, k, v = (t.unflatten(-1, (-1, _HEAD)).transpose(1, 2) for t in inputs)
        if mask is not None:
            mask = mask.to(q.dtype)
        return self.out(F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2))


class _Layers(nn.Module):
    """Transformer layers with the norm first and a causal mask."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.attention = nn.ModuleList(_Attention(width) for _ in range(layers))
        self.wide = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        for attention, wide in zip(self.attention, self.wide, strict=True):
            x = x + attention(x, mask=mask)
            x = x + wide(x)
        return self.norm(x)


def _causal(length: int, device: torch.device) -> torch.Tensor:
    return torch.full((length, length), float("-inf"), device=device).triu(1)


class _Text(nn.Module):
    """Tokens [batch, 77] to outputs at each token [batch, 77, width] and an embedding [batch, width]."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(_VOCABULARY, width)
        self.positions = nn.Parameter(torch.randn(_LENGTH, width) * 0.01)
        self.layers = _Layers(width, layers)
        self.projection = nn.Linear(width, width, bias=False)

    def forward(self, tokens: torch.Tensor, last: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        read = self.layers(self.tokens(tokens) + self.positions, _causal(_LENGTH, tokens.device))
        found = read.gather(1, last[:, None, None].expand(-1, 1, read.shape[-1]))[:, 0]
        return read, F.normalize(self.projection(found), dim=-1)


class _Prior(nn.Module):
    """A noisy embedding of an image to the embedding, given a text and the time."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.width = width
        self.time = nn.Sequential(nn.Linear(width, 2 * width), nn.SiLU(), nn.Linear(2 * width, width))
        self.missing = nn.Parameter(torch.randn(_LENGTH, width) * 0.02)  # in place of padding
        self.query = nn.Parameter(torch.randn(width) * 0.02)
        places = torch.arange(_LENGTH + 4)
        self.register_buffer("distances", (places[:, None] - places).clamp(min=0))
        self.by_distance = nn.Embedding(len(places), max(1, width // _HEAD))
        self.layers = _Layers(width, layers)

    def forward(
        self, noisy: torch.Tensor, time: torch.Tensor, read: torch.Tensor, text: torch.Tensor, is_text: torch.Tensor
    ) -> torch.Tensor:
        read = torch.where(is_text[..., None], read, self.missing)
        parts = [text, self.time(_embedded(time, self.width)), noisy, self.query.expand_as(noisy)]
        x = torch.cat([read, torch.stack([part.to(read.dtype) for part in parts], 1)], 1)
        bias = self.by_distance(self.distances).permute(2, 0, 1)
        return self.layers(x, bias + _causal(x.shape[1], x.device))[:, -1]


class _Block(nn.Module):
    """Two convolutions, each after a norm; the condition scales and shifts the first norm."""

    def __init__(self, channels: int, out: int, condition: int, source: int | None = None) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(channels, out, 3, padding=1), nn.Conv2d(out, out, 3, padding=1)
        self.norms = nn.ModuleList([nn.GroupNorm(8, out), nn.GroupNorm(8, out)])
        self.condition = nn.Linear(condition, 2 * out)
        self.short = nn.Conv2d(channels, out, 1) if channels != out else nn.Identity()
        self.look = _Attention(out, source) if source else None

    def forward(self, x: torch.Tensor, condition: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        scale, shift = self.condition(F.silu(condition))[..., None, None].chunk(2, 1)
        y = F.silu(self.norms[0](self.first(x)) * (scale + 1) + shift)
        if self.look is not None:
            y = y + self.look(y.flatten(2).mT, source).mT.unflatten(2, y.shape[2:])
        return F.silu(self.norms[1](self.second(y))) + self.short(x)


class _Unet(nn.Module):
    """A noisy image to its noise, given the time, an embedding of the image and a text."""

    def __init__(self, width: int, levels: int, embedding: int) -> None:
        super().__init__()
        self.width, condition, tokens = width, 4 * width, 4
        sizes = [width * 2**n for n in range(levels)]
        self.kernels = nn.ModuleList(
            nn.Conv2d(3, n, k, padding=k // 2) for n, k in ((width // 2, 3), (width // 4, 7), (width // 4, 15))
        )
        self.time = nn.Sequential(nn.Linear(width, condition), nn.SiLU(), nn.Linear(condition, condition))
        self.time_tokens = nn.Sequential(nn.Linear(condition, 2 * width), nn.Unflatten(1, (2, width)))
        self.image = nn.Linear(embedding, condition)
        self.image_tokens = nn.Sequential(nn.Linear(embedding, tokens * width), nn.Unflatten(1, (tokens, width)))
        self.text_tokens, self.norm = nn.Linear(embedding, width), nn.LayerNorm(width)
        self.down, self.up = nn.ModuleList(), nn.ModuleList()
        for n, size in enumerate(sizes):
            source = width if n >= levels - 2 else None
            before, after = sizes[max(n - 1, 0)], sizes[max(n - 1, 0)]
            blocks = [_Block(before, size, condition, source), _Block(size, size, condition, source)]
            self.down.append(nn.ModuleList([*blocks, nn.Conv2d(size, size, 4, 2, 1) if n < levels - 1 else None]))
            blocks = [_Block(2 * size, size, condition, source), _Block(2 * size, size, condition, source)]
            self.up.insert(0, nn.ModuleList([*blocks, nn.Conv2d(size, after, 3, padding=1)]))
        self.middle = nn.ModuleList(_Block(sizes[-1], sizes[-1], condition, width) for _ in range(2))
        self.inner = _Attention(sizes[-1])
        self.last = _Block(2 * width, width, condition)
        self.out = nn.Conv2d(width, 3, 3, padding=1)

    def forward(
        self, noisy: torch.Tensor, time: torch.Tensor, image: torch.Tensor, read: torch.Tensor, is_text: torch.Tensor
    ) -> torch.Tensor:
        spent = self.time(_embedded(time, self.width))
        condition = spent + self.image(image)
        texts = self.text_tokens(read) * is_text[..., None]
        source = self.norm(torch.cat([self.time_tokens(spent), self.image_tokens(image), texts], 1))
        first = x = torch.cat([layer(noisy) for layer in self.kernels], 1)
        kept = []
        for one, two, coarser in self.down:
            x = one(x, condition, source)
            kept.append(x)
            x = two(x, condition, source)
            kept.append(x)
            x = x if coarser is None else coarser(x)
        x = self.middle[0](x, condition, source)
        x = x + self.inner(x.flatten(2).mT).mT.unflatten(2, x.shape[2:])
        x = self.middle[1](x, condition, source)
        for level, (one, two, finer) in enumerate(self.up):
            x = one(torch.cat([x, kept.pop() * 2**-0.5], 1), condition, source)
            x = two(torch.cat([x, kept.pop() * 2**-0.5], 1), condition, source)
            x = finer(F.interpolate(x, scale_factor=2.0, mode="nearest") if level < len(self.up) - 1 else x)
        return self.out(self.last(torch.cat([x, first], 1), condition, source))


class _Dalle2(nn.Module):
    def __init__(self, text: _Text, prior: _Prior, decoder: _Unet) -> None:
        super().__init__()
        self.text, self.prior, self.decoder = text, prior, decoder

    def forward(self, tokens: torch.Tensor, noise: torch.Tensor, pixels: torch.Tensor) -> torch.Tensor:
        """Images from tokens [batch, 77] on the CPU, noise [2, batch, width] and noise [batch, 3, size, size]."""
        device = noise.device
        is_text, last = tokens != 0, tokens.argmax(-1)  # a text ends with the highest token
        time = torch.linspace(0, _STEPS, 3)[1].expand(len(tokens)).to(device)
        tokens, is_text, last = tokens.to(device), is_text.to(device), last.to(device)
        read, text = self.text(tokens, last)
        inputs = (t.repeat(len(noise), *[1] * (t.dim() - 1)) for t in (time, read, text, is_text))
        images = F.normalize(self.prior(noise.flatten(0, 1), *inputs), dim=-1).unflatten(0, noise.shape[:2])
        nearest = (images * text).sum(-1).argmax(0)
        image = images.gather(0, nearest[None, :, None].expand(1, -1, images.shape[-1]))[0]
        noise_left = self.decoder(pixels, time, image * image.shape[-1] ** 0.5, read, is_text).float()
        kept = _kept(time)[:, None, None, None]
        return ((pixels - (1 - kept).sqrt() * noise_left) / kept.sqrt()).clamp(-1, 1)


@workload("DALLE2", mode="inference", batch=1)
def build(
    *,
    batch: int = 1,
    size: int = 64,
    width: int = 128,
    levels: int = 4,
    text_width: int = 512,
    text_layers: int = 12,
    layers: int = 6,
) -> Made:
    """DALL-E 2, a step of the prior and of the decoder for 64x64, with a text from the CPU"""
    parts = (_Text(text_width, text_layers), _Prior(text_width, layers), _Unet(width, levels, text_width))
    model = _Dalle2(*parts).eval()
    noise, pixels = torch.randn(2, batch, text_width), torch.randn(batch, 3, size, size)
    tokens = torch.randint(1, _VOCABULARY - 1, (batch, _LENGTH), device="cpu")
    tokens[:, 20], tokens[:, 21:] = _VOCABULARY - 1, 0
    return model, (tokens, noise, pixels)
