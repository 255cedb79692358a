"""GPT-2 language modelling from transformers, with the sizes of distilgpt2: 6 layers of 768, vocabulary 50257.

12 heads, 3072 between the layers, 81.9 million parameters, 512 tokens per sequence, of 1024 possible ones. Differences:
tokens are random; dropout is computed and drops nothing. Weights are random, in float32 under bfloat16 autocast.
"""

from __future__ import annotations

from .registry import DROPS_NOTHING, Made, workload
from .texts import continued


@workload("DGPT2", mode="training", batch=16)
def build(*, batch: int = 16, sequence: int = 512, layers: int = 6, hidden: int = 768) -> Made:
    """DistilGPT2, language modelling step, 512 tokens"""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=layers,
        n_embd=hidden,
        n_head=hidden // 64,
        embd_pdrop=DROPS_NOTHING,
        attn_pdrop=DROPS_NOTHING,
        resid_pdrop=DROPS_NOTHING,
        use_cache=False,
    )
    model = GPT2LMHeadModel(config).train()
    model.loss_type = "ForCausalLM"  # the default, whose warning would break the graph
    return model, continued(config.vocab_size, batch, sequence)
