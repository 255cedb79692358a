"""The workloads: one file each, registered by name in :data:`WORKLOADS`.

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
