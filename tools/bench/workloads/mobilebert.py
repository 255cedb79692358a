"""MobileBERT question answering from transformers, with the sizes of mobilebert-uncased.

24 layers of 512 with a bottleneck of 128, vocabulary 30522; 128 tokens, and what a tokenizer gives: three live inputs.
"""

from __future__ import annotations

import torch

from pygraph_trees.comparison.program import Program

from .registry import inference, seeded, workload


@workload("MBERT", mode="inference", batch=128)
def build(device: torch.device | str, *, batch: int = 128, sequence: int = 128, layers: int = 24) -> Program:
    """MobileBERT, question answering, 128 tokens"""
    from transformers import MobileBertConfig, MobileBertForQuestionAnswering

    config = MobileBertConfig(num_hidden_layers=layers)
    with seeded(device):
        model = MobileBertForQuestionAnswering(config).eval()
        question = sequence // 16
        inputs = {
            "input_ids": torch.randint(config.vocab_size, (batch, sequence)),
            "attention_mask": torch.ones(batch, sequence, dtype=torch.int64),
            "token_type_ids": (torch.arange(sequence) >= question).long().repeat(batch, 1),
        }
    return Program(model, kwargs=inputs, context=inference(device), name="MBERT", batch=batch)
