"""Inputs of language models: random tokens, in the form in which a tokenizer or a data set gives them.

Each function of inputs takes the vocabulary's size, the batch and the length, and returns a dictionary from the names
of transformers' arguments to integers [batch, sequence], on the default device.
"""

from __future__ import annotations

import torch


def bert_sizes(layers: int, hidden: int) -> dict[str, int]:
    """A configuration's settings for a model of BERT's shape: heads of 64, and 4 times as wide between the layers."""
    inner = {"num_attention_heads": hidden // 64, "intermediate_size": 4 * hidden}
    return {"num_hidden_layers": layers, "hidden_size": hidden, **inner}


def labelled(vocabulary: int, batch: int, sequence: int) -> dict[str, torch.Tensor]:
    """Tokens, and others to be predicted."""
    return {name: torch.randint(vocabulary, (batch, sequence)) for name in ("input_ids", "labels")}


def continued(vocabulary: int, batch: int, sequence: int) -> dict[str, torch.Tensor]:
    """Tokens, each to be predicted from those before it."""
    tokens = torch.randint(vocabulary, (batch, sequence))
    return {"input_ids": tokens, "labels": tokens.clone()}


def question(vocabulary: int, batch: int, sequence: int) -> dict[str, torch.Tensor]:
    """A question, a 16th of the tokens, and a text that answers it."""
    return {
        "input_ids": torch.randint(vocabulary, (batch, sequence)),
        "attention_mask": torch.ones(batch, sequence, dtype=torch.int64),
        "token_type_ids": (torch.arange(sequence) >= sequence // 16).long().repeat(batch, 1),
    }
