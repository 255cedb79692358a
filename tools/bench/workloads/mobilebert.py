"""MobileBERT question answering from transformers, with the sizes of mobilebert-uncased.

24 layers of 512 with a bottleneck of 128, 4 heads, vocabulary 30522, 24.6 million parameters; 128 tokens and three live
inputs, as a tokenizer gives them. Tokens and weights are random, in float32 under bfloat16 autocast.
"""

from __future__ import annotations

import torch

from pygraph_trees.benchmark.program import Program

from .registry import inference, seeded, workload
from .texts import question


@workload("MBERT", mode="inference", batch=128)
def build(device: torch.device | str, *, batch: int = 128, sequence: int = 128, layers: int = 24) -> Program:
    """MobileBERT, question answering, 128 tokens"""
    from transformers import MobileBertConfig, MobileBertForQuestionAnswering

    config = MobileBertConfig(num_hidden_layers=layers)
    with seeded(device):
        model = MobileBertForQuestionAnswering(config).eval()
        inputs = question(config.vocab_size, batch, sequence)
    return Program(model, kwargs=inputs, context=inference(device), name="MBERT", batch=batch)
