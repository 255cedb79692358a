"""DeBERTa from transformers: masked language modelling in training, question answering by its second version.

Both have 512 tokens. The first version slices by a number in a tensor, at which Dynamo breaks the graph in each layer:
a step consists of many small graphs. The second puts a square root into a CPU tensor. README.md gives sizes.
"""

from __future__ import annotations

from .registry import DROPS_NOTHING, Made, workload
from .texts import bert_sizes, labelled, question


@workload("DMLM", mode="training", batch=8)
def build_training(*, batch: int = 8, sequence: int = 512, layers: int = 12, hidden: int = 768) -> Made:
    """DeBERTa base, masked language modelling step, 512 tokens"""
    from transformers import DebertaConfig, DebertaForMaskedLM

    config = DebertaConfig(
        **bert_sizes(layers, hidden),
        relative_attention=True,
        pos_att_type=["c2p", "p2c"],
        position_biased_input=False,
        hidden_dropout_prob=DROPS_NOTHING,
        attention_probs_dropout_prob=DROPS_NOTHING,
    )
    model = DebertaForMaskedLM(config).train()
    for layer in model.deberta.encoder.layer:
        layer.attention.self.q_bias.data = layer.attention.self.q_bias.data.bfloat16()
        layer.attention.self.v_bias.data = layer.attention.self.v_bias.data.bfloat16()
    return model, labelled(config.vocab_size, batch, sequence)


@workload("DBV2", mode="inference", batch=1)
def build_inference(*, batch: int = 1, sequence: int = 512, layers: int = 24, hidden: int = 1536) -> Made:
    """DeBERTa v2 xlarge, question answering, 512 tokens"""
    from transformers import DebertaV2Config, DebertaV2ForQuestionAnswering

    config = DebertaV2Config(
        **bert_sizes(layers, hidden),
        attention_head_size=64,
        relative_attention=True,
        pos_att_type=["p2c", "c2p"],
        position_biased_input=False,
        position_buckets=256,
        share_att_key=True,
        norm_rel_ebd="layer_norm",
        conv_kernel_size=3,
        conv_act="gelu",
    )
    model = DebertaV2ForQuestionAnswering(config).eval()
    return model, question(config.vocab_size, batch, sequence)
