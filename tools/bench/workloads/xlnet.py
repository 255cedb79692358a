"""XLNet language modelling from transformers, base size: 12 layers of 768, vocabulary 32000.

12 heads, 3072 between the layers, 116.8 million parameters, 512 tokens per sequence: the sizes of xlnet-base-cased. Up
to transformers 5.3 the model makes its relative positions on the CPU in every forward, which is why it is here; since
5.4 it makes them on the GPU. Weights are random, in float32 under bfloat16 autocast. README.md lists differences.
"""

from __future__ import annotations

import torch

from pygraph_trees.benchmark.program import Program

from .registry import DROPS_NOTHING, inference, seeded, training, workload
from .texts import continued


@workload("XLNET-I", mode="inference", batch=1)
def build(
    device: torch.device | str, *, batch: int = 1, sequence: int = 512, layers: int = 12, hidden: int = 768
) -> Program:
    """XLNet base, language modelling scores, 512 tokens"""
    from transformers import XLNetConfig, XLNetLMHeadModel

    config = XLNetConfig(d_model=hidden, n_layer=layers, n_head=hidden // 64, d_inner=4 * hidden)
    with seeded(device):
        model = XLNetLMHeadModel(config).to(device).eval()  # some parameters ignore the default device
        tokens = torch.randint(config.vocab_size, (batch, sequence))
    return Program(model, kwargs={"input_ids": tokens}, context=inference(device), name="XLNET-I", batch=batch)


@workload("XLNET-T", mode="training", batch=8)
def build_training(
    device: torch.device | str, *, batch: int = 8, sequence: int = 512, layers: int = 12, hidden: int = 768
) -> Program:
    """XLNet base, language modelling step, 512 tokens"""
    from transformers import XLNetConfig, XLNetLMHeadModel

    config = XLNetConfig(
        d_model=hidden,
        n_layer=layers,
        n_head=hidden // 64,
        d_inner=4 * hidden,
        dropout=DROPS_NOTHING,
        use_mems_train=False,
    )
    with seeded(device):
        model = XLNetLMHeadModel(config).to(device).train()  # some parameters ignore the default device
        inputs = continued(config.vocab_size, batch, sequence)
    return Program(model, kwargs=inputs, training=True, context=training(device), name="XLNET-T", batch=batch)
