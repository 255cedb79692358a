"""The program that the commands use if none is named: a BERT that reads a text byte by byte.

The model is transformers' ``BertForMaskedLM`` of base size (110 million parameters), in bfloat16 with random weights.
Its tokens are the bytes of ``default_text.txt``, cut into rows; every eighth one is masked, as in training. After the
256 bytes, the vocabulary has room for 128 special tokens, as ByT5's does; one of them is the mask.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from pygraph_trees.errors import PygraphError

_TEXT = Path(__file__).with_name("default_text.txt")
_ROW = 256  # bytes
_ROWS = 4
_MASK = 256  # the first token after the bytes
_VOCABULARY = 384
_FIRST_MASKED, _EACH = 3, 8


class TransformersMissing(PygraphError):
    template = "the default target needs transformers ({why}): pip install transformers"


def bert_reads_text(device: torch.device | str = "cuda") -> tuple[torch.nn.Module, tuple[()], dict[str, Any]]:
    """Model and keyword arguments: ``input_ids`` and ``attention_mask``, int64 of shape (4, 256), on ``device``."""
    try:
        from transformers import BertConfig, BertForMaskedLM
    except ImportError as error:
        raise TransformersMissing(why=error) from error

    torch.manual_seed(0)
    with torch.device(device):
        model = BertForMaskedLM(BertConfig(vocab_size=_VOCABULARY)).to(torch.bfloat16).eval()
    ids = masked_rows(_TEXT.read_bytes())
    tokens = ids.to(device)
    return model, (), {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}


def masked_rows(text: bytes) -> torch.Tensor:
    """The first 1024 bytes of a text as int64 of shape (4, 256), with every eighth one masked."""
    rows = torch.tensor(list(text[: _ROW * _ROWS]), dtype=torch.int64).reshape(_ROWS, _ROW)
    rows[:, _FIRST_MASKED::_EACH] = _MASK
    return rows
