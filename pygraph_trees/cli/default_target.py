"""The program that the commands use if none is named: a BERT that reads random tokens.

The model is transformers' ``BertForMaskedLM`` of base size, in bfloat16 with random weights and a vocabulary of 384
tokens, the 256 bytes and 128 special ones, as ByT5's (86 million parameters).
"""

from __future__ import annotations

from typing import Any

import torch

from pygraph_trees.errors import PygraphError

_VOCABULARY = 384


class TransformersMissing(PygraphError):
    template = "the default target needs transformers ({why}): pip install transformers"


def bert(device: torch.device | str = "cuda") -> tuple[torch.nn.Module, tuple[()], dict[str, Any]]:
    """Model and keyword arguments: ``input_ids`` and ``attention_mask``, int64 of shape (4, 256), on ``device``."""
    try:
        from transformers import BertConfig, BertForMaskedLM
    except ImportError as error:
        raise TransformersMissing(why=error) from error

    torch.manual_seed(0)
    with torch.device(device):
        model = BertForMaskedLM(BertConfig(vocab_size=_VOCABULARY)).to(torch.bfloat16).eval()
    tokens = torch.randint(_VOCABULARY, (4, 256)).to(device)
    return model, (), {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
