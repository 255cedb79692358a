"""The decoder of Speech2Text2 in training, without an encoder, 128 tokens.

transformers no longer has that model; this is TrOCR's decoder with the same settings: 6 layers of 256 with 4 heads,
2048 in between, vocabulary 10000. The attention to an encoder is skipped. README.md lists settings.
"""

from __future__ import annotations

from .registry import DROPS_NOTHING, Made, without_layer_drop, workload
from .texts import continued


@workload("STCLM", mode="training", batch=256)
def build(
    *, batch: int = 256, sequence: int = 128, layers: int = 6, hidden: int = 256, vocabulary: int = 10000
) -> Made:
    """Decoder of Speech2Text2, language modelling step, 128 tokens"""
    from transformers import TrOCRConfig, TrOCRForCausalLM

    config = TrOCRConfig(
        vocab_size=vocabulary,
        d_model=hidden,
        decoder_layers=layers,
        decoder_attention_heads=hidden // 64,
        decoder_ffn_dim=8 * hidden,
        activation_function="relu",
        max_position_embeddings=1024,
        dropout=DROPS_NOTHING,
        use_cache=False,
        scale_embedding=True,
        use_learned_position_embeddings=False,
        layernorm_embedding=False,
    )
    model = without_layer_drop(TrOCRForCausalLM(config).train())
    positions = model.model.decoder.embed_positions
    table = positions.get_embedding(config.max_position_embeddings, hidden, config.pad_token_id)
    del positions.weights
    positions.register_buffer("weights", table)
    return model, continued(vocabulary, batch, sequence)
