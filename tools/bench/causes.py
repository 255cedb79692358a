"""Why a workload was not measured, or why its outputs differ from upstream's, where a result file cannot tell."""

from __future__ import annotations

NOT_MEASURED = {
    "TEFD": "not ready in 430 s: Inductor takes 106 s to lower its 2,182 kernels, once for each of three ways",
}
DIFFERENT = {
    "DBV2": "`torch.compile` alone gives the one or the other result too "
    "([seen on an H200](reruns/h200-torch2.11-dbv2.txt))",
}
