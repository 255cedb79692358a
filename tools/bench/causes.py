"""Reasons that result files do not contain: why something was not measured, or why outputs differ."""

_CHOICE = (
    "Inductor times two block sizes of a reduction in each compilation; with the same size, ours {same} "
    "([measured](reruns/h100-torch2.11-two-results.txt))"
)
NOT_MEASURED = {
    "TEFD": "not ready after 430 s: Inductor takes 106 s to lower its 2,182 kernels, for each of three compiled ways",
}
UNTIMED = {  # why there are no times to compile and record
    "VM": "its first call caches anchors on the model, and with upstream alone, the next replay overwrites them",
}
DIFFERENT = {
    "DBV2": _CHOICE.format(same="equals upstream bit for bit"),
    "MTCG-T": _CHOICE.format(same="differs from upstream about as much as two of its calls differ"),
}
