"""A text to learn from, and a small GPT that reads and writes bytes.

:func:`read_text` assembles the text from installed documents, so nothing is downloaded. :class:`GPT` has the 256 bytes
as its vocabulary and needs no tokenizer. In training it sees a row of bytes at once; in generation it sees a few at a
time, with a cache of the earlier ones. Both give the same logits. A file without a model raises ``ValueError``.
"""

from __future__ import annotations

import ast
from dataclasses import asdict, dataclass
from pathlib import Path
from pydoc_data.topics import topics

import torch
from torch import nn
from torch.nn.functional import gelu, scaled_dot_product_attention

ROOT = Path(__file__).resolve().parents[2]
VOCABULARY = 256

# Keys and values, a tensor of shape (rows, heads, context, width of a head) for each layer.
Cache = tuple[list[torch.Tensor], list[torch.Tensor]]


def read_text() -> bytes:
    """This project's documents and docstrings, then Python's language reference as ``help()`` shows it: 600 kB."""
    parts = [(ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "CONTRIBUTING.md", "LICENSE")]
    for path in sorted((ROOT / "pygraph_trees").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
                parts.append(ast.get_docstring(node) or "")
    parts += [topics[name] for name in sorted(topics)]
    return "\n\n".join(filter(None, parts)).encode()


@dataclass(frozen=True, slots=True)
class Size:
    """The size of a model, and the number of rows of text in a training step."""

    layers: int
    width: int
    heads: int
    context: int  # bytes that it can see
    batch: int


SIZES = {"base": Size(6, 384, 6, 512, 32), "tiny": Size(2, 64, 2, 64, 4)}


class Block(nn.Module):
    """Attention and a perceptron, each after a norm and added to its input."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        self.norms = nn.ModuleList(nn.LayerNorm(size.width) for _ in range(2))
        self.mixed = nn.Linear(size.width, 3 * size.width)
        self.out = nn.Linear(size.width, size.width)
        self.up = nn.Linear(size.width, 4 * size.width)
        self.down = nn.Linear(4 * size.width, size.width)

    def forward(
        self,
        x: torch.Tensor,
        position: torch.Tensor | None = None,
        seen: torch.Tensor | None = None,
        cached: list[torch.Tensor] | None = None,
    ) -> torch.Tensor:
        mixed = self.mixed(self.norms[0](x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        query, key, value = mixed.unbind()
        if cached is None:
            found = scaled_dot_product_attention(query, key, value, is_causal=True)
        else:
            keys, values = cached
            keys.index_copy_(2, position, key)
            values.index_copy_(2, position, value)
            found = scaled_dot_product_attention(query, keys, values, attn_mask=seen)
        x = x + self.out(found.transpose(1, 2).flatten(2))
        return x + self.down(gelu(self.up(self.norms[1](x))))


class GPT(nn.Module):
    """A pre-norm transformer with learned positions."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.size = size
        self.bytes = nn.Embedding(VOCABULARY, size.width)
        self.positions = nn.Embedding(size.context, size.width)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, VOCABULARY, bias=False)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)

    def forward(
        self, tokens: torch.Tensor, position: torch.Tensor | None = None, cache: Cache | None = None
    ) -> torch.Tensor:
        """Logits of the byte after each of ``tokens``, of shape (rows, bytes, 256).

        Args:
            tokens: int64 of shape (rows, bytes).
            position: int64 of shape (bytes,), their positions in the text; by default from its beginning.
            cache: of :meth:`empty_cache`; keys and values are written to it at ``position``, and those of earlier
                positions are read from it. Without a cache, the tokens see only each other.
        """
        if position is None:
            position = torch.arange(tokens.size(1), device=tokens.device)
        x = self.bytes(tokens) + self.positions(position)
        if cache is None:
            for block in self.blocks:
                x = block(x)
        else:
            seen = torch.arange(self.size.context, device=tokens.device) <= position[:, None]
            for block, *cached in zip(self.blocks, *cache, strict=True):
                x = block(x, position, seen, cached)
        return self.head(self.norm(x))

    def empty_cache(self, rows: int = 1) -> Cache:
        """New tensors for one conversation."""
        size = self.size
        shape = (rows, size.heads, size.context, size.width // size.heads)
        keys, values = ([torch.zeros(shape, device=self.head.weight.device) for _ in self.blocks] for _ in range(2))
        return keys, values


def save(model: GPT, path: Path) -> None:
    """Writes the model's size and weights."""
    torch.save({"size": asdict(model.size), "weights": model.state_dict()}, path)


def load(path: Path, device: torch.device) -> GPT:
    """The model that :func:`save` wrote; raises ``ValueError`` if the file holds anything else."""
    try:
        saved = torch.load(path, map_location=device, weights_only=True)
        model = GPT(Size(**saved["size"])).to(device)
        model.load_state_dict(saved["weights"])
    except Exception as error:  # the unpickler may raise any exception
        raise ValueError(f"{path} does not hold what train.py --out writes: {type(error).__name__}") from error
    return model
