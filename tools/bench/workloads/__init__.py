"""The workloads: one file each, registered by name in :data:`WORKLOADS`.

A workload has the model, mode and batch size of the paper's list; BERT-I alone is not on the list. README.md says what
each one follows and where it differs. All weights and inputs are random. To add one, write a file with a builder under
:func:`registry.workload`, and import the file below.
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
