"""The workloads: one file each, registered by name in :data:`WORKLOADS`.

To add one, write a file with a builder under :func:`registry.workload`, and name the file below.
"""

from __future__ import annotations

from . import alexnet, bert, clip, deep_recommender, dlrm, ocean_eos, ocean_tke, speech, xlnet
from .registry import WORKLOADS, Workload

__all__ = [
    "WORKLOADS",
    "Workload",
    "alexnet",
    "bert",
    "clip",
    "deep_recommender",
    "dlrm",
    "ocean_eos",
    "ocean_tke",
    "speech",
    "xlnet",
]
