"""Kernels whose parameters hide no address from a scan, by the driver's name for them (mangled).

Such a kernel gets an input's address only as a word of its parameters, or of a table that a kernel of the same graph
makes from such words. All others are unknown: kernels of users and of custom operators, and libraries that were not
examined. A graph with an unknown kernel is checked when it is recorded (:mod:`.hidden_addresses`); replays cost no
more.
"""

from __future__ import annotations

import functools
import re

# Each family was replayed with poisoned old inputs and gave the right results (H200, torch 2.11; the programs are in
# test/gpu/test_indirection_kernels.py, test_indirection_libraries.py and test_indirection_matmul.py). Names of torch's
# own kernels are those that libtorch_cuda.so of torch 2.11 registers.
_FAMILIES = (
    # Inductor's Triton kernels: pointwise, reductions, split scans, templates, combo kernels. Their name is triton_
    # alone if config.triton.unique_kernel_names is off.
    r"triton_(poi|red|per|spl|tem|for|unk)_",
    r"triton_$",
    # The kernel that holds staged bytes, or the addresses of a table, by value.
    r"pygraph_put_\d+$",
    # ATen: elementwise, reductions, foreach, indexing, embedding bag, sort. Its grouped matmuls read tables that an
    # earlier kernel of the same graph makes.
    r"_ZN2at(6native|4cuda)",
    # ATen's kernels outside of its namespace, by their source file.
    r"_ZN\d+_GLOBAL__N__[0-9a-f]+_\d+_(SoftMax|RangeFactories|Indexing|Randperm)_cu_",
    r"_ZN7cutlass(13device_kernel|6Kernel|7Kernel2)IN2at4cuda",
    # CUB and thrust in torch: sort, scan, select. Other libraries put them in other namespaces.
    r"_ZN14at_cuda_detail3cub",
    r"_ZN6thrust\d+THRUST_\d+_SM_",
    # Flash attention and memory-efficient attention in torch.
    r"_ZN13pytorch_flash",
    r"_Z\d+fmha_cutlass[FB]_",
    # cuBLAS and cuBLASLt: nvjet, xmma, CUTLASS under cuBLAS's own names, SASS kernels, matrix times vector.
    r"nvjet_",
    r"sm\d+_xmma_",
    r"cutlass_\d+_(simt|wmma|tensorop)_",
    r"_ZN7cutlass(6Kernel|7Kernel2)I\d+cutlass_\d+_",
    r"(maxwell|volta|turing|ampere|hopper)_[a-z0-9]*(gemm|_xmma)",
    r"_ZN8cublasLt",
    r"_ZN8internal5gemvx",
    r"_Z\d+(gemv2[NT]_kernel|gemvNSP_kernel|gemmSN_[NT]N_kernel|gemmk1_kernel|splitKreduce_kernel)",
    r"_Z\d+(dot_kernel|reduce_1Block_kernel)I",
    # cuDNN: convolution and attention.
    r"_ZN5cudnn",
    r"_ZN\d+cutlass__5x_cudnn",
    r"cudnn_",
)
_KNOWN = re.compile("|".join(_FAMILIES))


@functools.lru_cache(maxsize=4096)
def is_known(name: str) -> bool:
    return _KNOWN.match(name) is not None
