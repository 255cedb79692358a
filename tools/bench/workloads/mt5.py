"""MT5 from transformers: predicting a target from a source, 128 tokens each.

The sizes are those of mt5-small: 8 layers of 512 in the encoder and the decoder, 6 heads of 64, gated layers of 1024,
vocabulary 250112. As in the checkpoint, the output layer shares nothing with the embedding; transformers ties the two
since its version 5, so the output layer is made anew. In inference the target is given as well, and no cache of keys
and values is returned.
"""

from __future__ import annotations

from typing import Any

import torch

from pygraph_trees.comparison.program import Program

from .registry import DROPS_NOTHING, inference, seeded, training, workload


def _model(layers: int, hidden: int, vocabulary: int, **settings: Any) -> torch.nn.Module:
    from transformers import MT5Config, MT5ForConditionalGeneration

    config = MT5Config(
        vocab_size=vocabulary,
        d_model=hidden,
        d_ff=2 * hidden,
        num_layers=layers,
        num_decoder_layers=layers,
        use_cache=False,
        **settings,
    )
    model = MT5ForConditionalGeneration(config)
    model.lm_head = torch.nn.Linear(hidden, vocabulary, bias=False)
    return model


@workload("MTCG-T", mode="training", batch=16)
def build_training(
    device: torch.device | str,
    *,
    batch: int = 16,
    sequence: int = 128,
    layers: int = 8,
    hidden: int = 512,
    vocabulary: int = 250112,
) -> Program:
    """MT5 small, training step, 128 tokens to 128 tokens"""
    with seeded(device):
        model = _model(layers, hidden, vocabulary, dropout_rate=DROPS_NOTHING).train()
        inputs = {
            "input_ids": torch.randint(vocabulary, (batch, sequence)),
            "labels": torch.randint(vocabulary, (batch, sequence)),
        }
    return Program(model, kwargs=inputs, training=True, context=training(device), name="MTCG-T", batch=batch)


@workload("MTCG-I", mode="inference", batch=16)
def build_inference(
    device: torch.device | str,
    *,
    batch: int = 16,
    sequence: int = 128,
    layers: int = 8,
    hidden: int = 512,
    vocabulary: int = 250112,
) -> Program:
    """MT5 small, scores of 128 tokens given 128 tokens"""
    with seeded(device):
        model = _model(layers, hidden, vocabulary).eval()
        inputs = {
            "input_ids": torch.randint(vocabulary, (batch, sequence)),
            "decoder_input_ids": torch.randint(vocabulary, (batch, sequence)),
        }
    return Program(model, kwargs=inputs, context=inference(device), name="MTCG-I", batch=batch)
