"""MT5 from transformers: predicts a target from a source, 128 tokens each.

The sizes are those of mt5-small, 300 million parameters. Inference gets the target as well, and returns no cache of
keys and values. README.md lists differences.
"""

from __future__ import annotations

import torch

from .registry import DROPS_NOTHING, Made, workload
from .texts import labelled


def _build(
    trains: bool, batch: int = 16, sequence: int = 128, layers: int = 8, hidden: int = 512, vocabulary: int = 250112
) -> Made:
    from transformers import MT5Config, MT5ForConditionalGeneration

    config = MT5Config(
        vocab_size=vocabulary,
        d_model=hidden,
        d_ff=2 * hidden,
        num_layers=layers,
        num_decoder_layers=layers,
        dropout_rate=DROPS_NOTHING,
        use_cache=False,
    )
    model = MT5ForConditionalGeneration(config).train(trains)
    model.lm_head = torch.nn.Linear(hidden, vocabulary, bias=False)
    inputs = labelled(vocabulary, batch, sequence)
    if not trains:
        inputs["decoder_input_ids"] = inputs.pop("labels")
    return model, inputs


@workload("MTCG-T", mode="training", batch=16)
def build_training(**sizes: int) -> Made:
    """MT5 small, training step, 128 tokens to 128 tokens"""
    return _build(True, **sizes)


@workload("MTCG-I", mode="inference", batch=16)
def build_inference(**sizes: int) -> Made:
    """MT5 small, scores of 128 tokens given 128 tokens"""
    return _build(False, **sizes)
