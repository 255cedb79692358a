"""Reasons that result files do not contain: why a workload was not measured, or why its outputs differ."""

from __future__ import annotations

NOT_MEASURED = {
    "TEFD": "not ready after 430 s: Inductor takes 106 s to lower its 2,182 kernels, for each of three compiled ways",
}
DIFFERENT = {
    "DBV2": "Inductor's code is the same and returns one of two results; `torch.compile` alone differs as much "
    "([seen on an H200](reruns/h200-torch2.11-dbv2.txt))",
}
