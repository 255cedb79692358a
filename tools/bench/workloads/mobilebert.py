"""MobileBERT question answering from transformers, with the sizes of mobilebert-uncased.

24 layers of 512 with a bottleneck of 128, 4 heads, vocabulary 30522, 24.6 million parameters; 128 tokens and three live
inputs, as a tokenizer gives them. Tokens and weights are random, in float32 under bfloat16 autocast.
"""

from __future__ import annotations

from .registry import Made, workload
from .texts import question


@workload("MBERT", mode="inference", batch=128)
def build(*, batch: int = 128, sequence: int = 128, layers: int = 24) -> Made:
    """MobileBERT, question answering, 128 tokens"""
    from transformers import MobileBertConfig, MobileBertForQuestionAnswering

    config = MobileBertConfig(num_hidden_layers=layers)
    model = MobileBertForQuestionAnswering(config).eval()
    return model, question(config.vocab_size, batch, sequence)
