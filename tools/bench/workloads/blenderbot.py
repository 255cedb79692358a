"""Blenderbot small from transformers: predicts an answer, 128 tokens from 128 tokens.

The sizes are those of blenderbot_small-90M, with vocabulary 54944 (the configuration's default is 50265); 87.5 million
parameters. README.md lists differences.
"""

from __future__ import annotations

from .registry import DROPS_NOTHING, Made, without_layer_drop, workload
from .texts import labelled


@workload("BSCG", mode="training", batch=64)
def build(*, batch: int = 64, sequence: int = 128, layers: int = 8, hidden: int = 512, vocabulary: int = 54944) -> Made:
    """Blenderbot small, training step, 128 tokens to 128 tokens"""
    from transformers import BlenderbotSmallConfig, BlenderbotSmallForConditionalGeneration

    config = BlenderbotSmallConfig(
        vocab_size=vocabulary,
        d_model=hidden,
        encoder_layers=layers,
        decoder_layers=layers,
        encoder_attention_heads=hidden // 32,
        decoder_attention_heads=hidden // 32,
        encoder_ffn_dim=4 * hidden,
        decoder_ffn_dim=4 * hidden,
        dropout=DROPS_NOTHING,
        use_cache=False,
    )
    model = without_layer_drop(BlenderbotSmallForConditionalGeneration(config).train())
    return model, labelled(vocabulary, batch, sequence)
