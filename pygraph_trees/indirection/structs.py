"""What structs among the parameters of ATen's own kernels hold: which bytes are numbers, and which addresses there are.

Arrays in a struct may be filled in part, and bytes after the last number are not filled at all. There are stale words
of the stack, which may be addresses. One whose first bytes are a number in use looks like another address nearby.
"""

from __future__ import annotations

import enum
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pygraph_trees.cuda.graph_nodes import Layout

# Kernels over lists of tensors (foreach functions, `cat`): addresses first, then numbers.
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


class Pointers(enum.Enum):
    """Which addresses near an input a struct among a kernel's parameters may hold."""

    ANY = enum.auto()
    INSIDE = enum.auto()  # of elements: all that ATen gives its own kernels
    FIRST = enum.auto()  # of the first element: numbers of any size may follow, which look like other addresses


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
