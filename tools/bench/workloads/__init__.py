"""The workloads: one file each, registered by name in :data:`WORKLOADS`.

Of the paper's list a workload has the model, inference or training, and the batch size; BERT-I alone is not on it. The
list does not say how long sequences are or how large images, nor always which of a model's sizes is meant: each file
says what it took, what it follows, and where it differs. All weights and inputs are random. Weights are float32, but
for the biases of DMLM's queries and values, and models run under bfloat16 autocast; the two ocean kernels are in
float64. Training has a forward, a loss and a backward, and no optimizer.

To add one, write a file with a builder under :func:`registry.workload`, and name the file below.
"""

from __future__ import annotations

from . import (
    alexnet,
    bert,
    blenderbot,
    clip,
    dalle2,
    dcgan,
    deberta,
    deep_recommender,
    densenet,
    dlrm,
    efficientdet,
    gpt2,
    lcnet,
    mask_rcnn,
    mobilebert,
    mt5,
    ocean_eos,
    ocean_tke,
    speech,
    speech_decoder,
    xlnet,
)
from .registry import WORKLOADS, Workload

__all__ = [
    "WORKLOADS",
    "Workload",
    "alexnet",
    "bert",
    "blenderbot",
    "clip",
    "dalle2",
    "dcgan",
    "deberta",
    "deep_recommender",
    "densenet",
    "dlrm",
    "efficientdet",
    "gpt2",
    "lcnet",
    "mask_rcnn",
    "mobilebert",
    "mt5",
    "ocean_eos",
    "ocean_tke",
    "speech",
    "speech_decoder",
    "xlnet",
]
