"""Operators whose Triton kernels Inductor does not see.

Some of the kernels are given addresses as pointers, and some in other forms: in two halves, or through tables.
Importing this module registers the operators. Triton must be importable.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

KEY = 0x0A5A_5A5A_0F0F_3C3C
_KEY = tl.constexpr(KEY)
_BLOCK = 256


@triton.jit
def hidden_plain_kernel(x_ptr, out_ptr, count, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < count
    tl.store(out_ptr + offsets, tl.load(x_ptr + offsets, mask=inside) * 2, mask=inside)


@triton.jit(do_not_specialize=["low", "high"])
def hidden_halves_kernel(low, high, out_ptr, count, BLOCK: tl.constexpr):
    address = (high.to(tl.int64) << 32) | (low.to(tl.int64) & 0xFFFFFFFF)
    x_ptr = address.to(tl.pointer_type(tl.float32))
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < count
    tl.store(out_ptr + offsets, tl.load(x_ptr + offsets, mask=inside) * 2, mask=inside)


@triton.jit(do_not_specialize=["hidden"])
def hidden_xored_kernel(hidden, out_ptr, count, BLOCK: tl.constexpr):
    x_ptr = (hidden ^ _KEY).to(tl.pointer_type(tl.float32))
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < count
    tl.store(out_ptr + offsets, tl.load(x_ptr + offsets, mask=inside) * 2, mask=inside)


@triton.jit(do_not_specialize=["low", "high"])
def hidden_writing_kernel(low, high, x_ptr, count, BLOCK: tl.constexpr):
    address = (high.to(tl.int64) << 32) | (low.to(tl.int64) & 0xFFFFFFFF)
    target_ptr = address.to(tl.pointer_type(tl.float32))
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < count
    total = tl.load(target_ptr + offsets, mask=inside) + tl.load(x_ptr + offsets, mask=inside)
    tl.store(target_ptr + offsets, total, mask=inside)


@triton.jit
def hidden_in_place_kernel(target_ptr, x_ptr, count, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < count
    total = tl.load(target_ptr + offsets, mask=inside) + tl.load(x_ptr + offsets, mask=inside)
    tl.store(target_ptr + offsets, total, mask=inside)


@triton.jit
def hidden_picking_kernel(values_ptr, index_ptr, out_ptr, count, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < count
    index = tl.load(index_ptr + offsets, mask=inside, other=0)
    tl.store(out_ptr + offsets, tl.load(values_ptr + index, mask=inside), mask=inside)


@triton.jit(do_not_specialize=["low", "high"])
def hidden_index_kernel(values_ptr, low, high, out_ptr, count, BLOCK: tl.constexpr):
    address = (high.to(tl.int64) << 32) | (low.to(tl.int64) & 0xFFFFFFFF)
    index_ptr = address.to(tl.pointer_type(tl.int64))
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < count
    index = tl.load(index_ptr + offsets, mask=inside, other=0)
    tl.store(out_ptr + offsets, tl.load(values_ptr + index, mask=inside), mask=inside)


@triton.jit
def hidden_address_kernel(x_ptr, table_ptr):
    tl.store(table_ptr, x_ptr.to(tl.int64))


@triton.jit(do_not_specialize=["low", "high"])
def hidden_table_kernel(low, high, table_ptr):
    tl.store(table_ptr, (high.to(tl.int64) << 32) | (low.to(tl.int64) & 0xFFFFFFFF))


@triton.jit
def hidden_tabled_kernel(table_ptr, out_ptr, count, BLOCK: tl.constexpr):
    x_ptr = tl.load(table_ptr).to(tl.pointer_type(tl.float32))
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < count
    tl.store(out_ptr + offsets, tl.load(x_ptr + offsets, mask=inside) * 2, mask=inside)


@triton.jit
def hidden_adding_up_kernel(x_ptr, out_ptr, count, BLOCK: tl.constexpr):
    """Adds values in an order that may differ at each launch."""
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < count
    tl.atomic_add(out_ptr + offsets % 3, tl.load(x_ptr + offsets, mask=inside), mask=inside)


def halves_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Low and high half of an address, as two int32."""
    low = tensor.data_ptr() % 2**32
    return low - 2**32 if low >= 2**31 else low, tensor.data_ptr() >> 32


def grid(tensor: torch.Tensor) -> tuple[int]:
    return (triton.cdiv(tensor.numel(), _BLOCK),)


def _like(x: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("pygraph_hidden_test::doubled", mutates_args=())
def doubled(x: torch.Tensor) -> torch.Tensor:
    """Its kernel is given a pointer."""
    out = torch.empty_like(x)
    hidden_plain_kernel[grid(x)](x, out, x.numel(), BLOCK=_BLOCK)
    return out


@torch.library.custom_op("pygraph_hidden_test::halves", mutates_args=())
def halves(x: torch.Tensor) -> torch.Tensor:
    """Its kernel is given the two halves of an address."""
    out = torch.empty_like(x)
    hidden_halves_kernel[grid(x)](*halves_of(x), out, x.numel(), BLOCK=_BLOCK)
    return out


@torch.library.custom_op("pygraph_hidden_test::xored", mutates_args=())
def xored(x: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    hidden_xored_kernel[grid(x)](x.data_ptr() ^ KEY, out, x.numel(), BLOCK=_BLOCK)
    return out


@torch.library.custom_op("pygraph_hidden_test::tabled", mutates_args=())
def tabled(x: torch.Tensor) -> torch.Tensor:
    """Its kernel reads a table, which an earlier kernel makes from a pointer."""
    out, table = torch.empty_like(x), torch.empty(1, dtype=torch.int64, device=x.device)
    hidden_address_kernel[(1,)](x, table)
    hidden_tabled_kernel[grid(x)](table, out, x.numel(), BLOCK=_BLOCK)
    return out


@torch.library.custom_op("pygraph_hidden_test::tabled_halves", mutates_args=())
def tabled_halves(x: torch.Tensor) -> torch.Tensor:
    """Its kernel reads a table, which an earlier kernel makes from halves of an address."""
    out, table = torch.empty_like(x), torch.empty(1, dtype=torch.int64, device=x.device)
    hidden_table_kernel[(1,)](*halves_of(x), table)
    hidden_tabled_kernel[grid(x)](table, out, x.numel(), BLOCK=_BLOCK)
    return out


@torch.library.custom_op("pygraph_hidden_test::added", mutates_args=("target",))
def added_(target: torch.Tensor, x: torch.Tensor) -> None:
    hidden_in_place_kernel[grid(x)](target, x, x.numel(), BLOCK=_BLOCK)


@torch.library.custom_op("pygraph_hidden_test::added_halves", mutates_args=("target",))
def added_halves_(target: torch.Tensor, x: torch.Tensor) -> None:
    """Its kernel writes to an address that it is given in halves."""
    hidden_writing_kernel[grid(x)](*halves_of(target), x, x.numel(), BLOCK=_BLOCK)


@torch.library.custom_op("pygraph_hidden_test::picked", mutates_args=())
def picked(values: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    out = torch.empty(index.shape, dtype=values.dtype, device=values.device)
    hidden_picking_kernel[grid(index)](values, index, out, index.numel(), BLOCK=_BLOCK)
    return out


@torch.library.custom_op("pygraph_hidden_test::picked_halves", mutates_args=())
def picked_halves(values: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Its kernel is given halves of the address of the indices."""
    out = torch.empty(index.shape, dtype=values.dtype, device=values.device)
    hidden_index_kernel[grid(index)](values, *halves_of(index), out, index.numel(), BLOCK=_BLOCK)
    return out


@torch.library.custom_op("pygraph_hidden_test::added_up", mutates_args=())
def added_up(x: torch.Tensor) -> torch.Tensor:
    """Three sums, by atomic additions."""
    out = torch.zeros(3, device=x.device)
    hidden_adding_up_kernel[grid(x)](x, out, x.numel(), BLOCK=_BLOCK)
    return out


for _operator in (doubled, halves, xored, tabled, tabled_halves):
    _operator.register_fake(_like)
for _operator in (picked, picked_halves):
    _operator.register_fake(lambda values, index: torch.empty(index.shape, dtype=values.dtype, device=values.device))
added_up.register_fake(lambda x: x.new_empty(3))
