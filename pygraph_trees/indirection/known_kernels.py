"""Kernels whose parameters hide no address from a scan, by the driver's name for them (mangled).

Such a kernel gets an input's address only as a word of its parameters, or of a table that a kernel of the same graph
makes from such words. All others are unknown: kernels of users and of custom operators, and libraries that were not
examined. A graph with an unknown kernel is checked when it is recorded (:mod:`.hidden_addresses`); replays cost no
more.
"""

from __future__ import annotations

import enum
import functools
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pygraph_trees.cuda.graph_nodes import Layout

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

# ATen's kernels over lists of tensors (foreach functions, `cat`) take structs whose arrays are filled in part:
# addresses first, then numbers. What is not filled has stale words of the stack.
_OF_A_LIST = re.compile(
    r"_ZN2at6native.*multi_tensor_apply_kernel.*?(FusedOptimizer)?TensorList(ScalarList)?MetadataI(\w*?)Li(\d)E"
)
_OF_CAT = re.compile(r"_ZN2at6native.*CatArrayBatchedCopy.*?Li\d+ELi(\d+)ELi\d+E")  # its second parameter's addresses
_BLOCKS = 320
_TENSORS = {1: 110, 2: 64, 3: 48, 4: 36, 5: 30}  # by the number of lists
_SCALARS = {**dict.fromkeys("bah", 1), "s": 2, **dict.fromkeys("if", 4), **dict.fromkeys("ld", 8)}  # bytes, by type
_SCALARS |= {"N3c107complexIfEE": 8, "N3c107complexIdEE": 16}
_FEWER = {(False, 1): 96, (True, 1): 72, (True, 2): 60}  # tensors, by whether scalars take 16 bytes, and lists
# With CUDA 13, torch 2.13 and newer have seven times as many of all, and numbers of tensors take 2 bytes.
_FORMS = ((1, 1), (7, 2))
_ATENS = re.compile("_ZN2at6native")
_WITH_STRIDES = re.compile("_ZN2at6native18elementwise_kernelI.*gpu_kernel_impl")


@functools.lru_cache(maxsize=4096)
def is_known(name: str) -> bool:
    return _KNOWN.match(name) is not None


class Pointers(enum.Enum):
    """Which addresses near an input a struct among a kernel's parameters may hold."""

    ANY = enum.auto()
    INSIDE = enum.auto()  # of elements: all that ATen gives its own kernels
    FIRST = enum.auto()  # of the first element; numbers of any size may follow, and few programs pass parts


def pointers_of(name: str) -> Pointers:
    if _WITH_STRIDES.match(name) is not None:
        return Pointers.FIRST
    return Pointers.ANY if _ATENS.match(name) is None else Pointers.INSIDE


def numbers_in(name: str, layout: Layout | None) -> range | None:
    """The bytes of a kernel's parameters that hold only numbers; none may be known. None: its struct is unknown."""
    if (found := _OF_A_LIST.match(name)) is not None:
        begin, nbytes = layout[0] if layout else (0, 0)
        ranges = [_numbers_of_a_list(*form, *found.groups()) for form in _FORMS]
        return next((range(begin + first, begin + end) for first, end in ranges if end == nbytes), None)
    if (found := _OF_CAT.match(name)) is not None:
        return range(layout[1][0] + 8 * int(found[1]), sum(layout[1])) if layout and len(layout) > 1 else None
    return range(0)


def _numbers_of_a_list(
    times: int, number_nbytes: int, of_optimizer: str | None, with_scalars: str | None, scalar: str, lists: str
) -> tuple[int, int]:
    """Where a struct's numbers begin, and its size (ATen/native/cuda/MultiTensorApply.cuh)."""
    count, scalar_nbytes = int(lists), _SCALARS.get(scalar, 0)
    tensors = _TENSORS.get(count, 0)
    if with_scalars:
        tensors = _FEWER.get((scalar_nbytes == 16, count), tensors)
    tensors, blocks = times * tensors, times * _BLOCKS
    addresses = 8 * count * tensors
    if of_optimizer:  # those of the steps come after the sizes
        addresses += 2 * 8 * tensors
    numbers = (0 if of_optimizer else 8 * tensors) + tensors * scalar_nbytes + blocks * number_nbytes
    end = -(-(addresses + numbers) // 4) * 4 + 4 * blocks + (0 if with_scalars else 4)
    return addresses, -(-end // 8) * 8
