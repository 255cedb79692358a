"""BERT from transformers: masked language modelling in training, question answering in inference.

Both have bert-base-uncased's size. Training has 512 tokens per sequence. Inference, which is not on the paper's list,
has 384, the length used for SQuAD, and three live inputs, as a tokenizer gives them.
"""

from __future__ import annotations

from .registry import DROPS_NOTHING, Made, workload
from .texts import bert_sizes, labelled, question


@workload("BERT", mode="training", batch=16)
def build_training(*, batch: int = 16, sequence: int = 512, layers: int = 12, hidden: int = 768) -> Made:
    """BERT base, masked language modelling step, 512 tokens"""
    from transformers import BertConfig, BertForMaskedLM

    drops = {"hidden_dropout_prob": DROPS_NOTHING, "attention_probs_dropout_prob": DROPS_NOTHING}
    config = BertConfig(**bert_sizes(layers, hidden), **drops)
    model = BertForMaskedLM(config).train()
    return model, labelled(config.vocab_size, batch, sequence)


@workload("BERT-I", mode="inference", batch=1)
def build_inference(*, batch: int = 1, sequence: int = 384, layers: int = 12, hidden: int = 768) -> Made:
    """BERT base, question answering, 384 tokens"""
    from transformers import BertConfig, BertForQuestionAnswering

    config = BertConfig(**bert_sizes(layers, hidden))
    model = BertForQuestionAnswering(config).eval()
    return model, question(config.vocab_size, batch, sequence)
