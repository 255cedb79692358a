"""Figures of the paper "PyGraph" (arXiv 2503.19779) by workload, for comparison with ours.

They were measured on an H100 with PyTorch of April 2024, relative to its CUDA graphs at that time. :data:`BESIDES`
names the workloads that the paper does not have.
"""

GEOMETRIC_MEAN = 1.29
BESIDES = frozenset({"BERT-I"})  # workloads that are not the paper's
FIGURES = {
    "XLNET-I": "3.36x; coverage 0 → 99.3%",
    "MMC": "2.31x by placement; coverage 0 → 99.3%",
    "ST": "2x by placement; coverage 5 → 74%",
    "DALLE2": "1.43x by placement; copies are 24% of the time",
    "EOS": "a graph is 29% slower than none",
    "TKE": "1.23x by indirection",
    "VM": "4 of 21 graphs kept; coverage 59 → 71%",
    "DR-I": "1.18x by indirection; copies are 17% of the time",
    "DR-T": "1.18x by indirection; copies are 17% of the time",
    "XLNET-T": "1.16x by placement",
    "MTCG-T": "1 GB copied → 312 B",
    "MTCG-I": "1 GB copied → 312 B",
    "DGPT2": "953 MB copied → 136 B",
    "STCLM": "850 MB copied → 136 B",
    "DMLM": "548 MB copied → 136 B",
}
