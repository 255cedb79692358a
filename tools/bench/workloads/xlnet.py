"""XLNet language modelling from transformers, base size: 12 layers of 768, vocabulary 32000.

The sizes are those of xlnet-base-cased, with 512 tokens per sequence; 116.8 million parameters. Up to transformers 5.3
the model makes its relative positions on the CPU in every forward, which is why it is here.
"""

from __future__ import annotations

from typing import Any

import torch

from .registry import DROPS_NOTHING, Made, workload
from .texts import continued


def _model(layers: int, hidden: int, **settings: Any) -> Any:
    from transformers import XLNetConfig, XLNetLMHeadModel

    config = XLNetConfig(d_model=hidden, n_layer=layers, n_head=hidden // 64, d_inner=4 * hidden, **settings)
    return XLNetLMHeadModel(config).to(torch.get_default_device())  # some parameters ignore the default device


@workload("XLNET-I", mode="inference", batch=1)
def build(*, batch: int = 1, sequence: int = 512, layers: int = 12, hidden: int = 768) -> Made:
    """XLNet base, language modelling scores, 512 tokens"""
    model = _model(layers, hidden).eval()
    return model, {"input_ids": torch.randint(model.config.vocab_size, (batch, sequence))}


@workload("XLNET-T", mode="training", batch=8)
def build_training(*, batch: int = 8, sequence: int = 512, layers: int = 12, hidden: int = 768) -> Made:
    """XLNet base, language modelling step, 512 tokens"""
    model = _model(layers, hidden, dropout=DROPS_NOTHING, use_mems_train=False).train()
    return model, continued(model.config.vocab_size, batch, sequence)
