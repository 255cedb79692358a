"""Triton kernels of the kinds that Inductor runs, with their compile options: a :class:`Case` for each."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any, NamedTuple

import triton
import triton.language as tl

SCALE = tl.constexpr(3)
SIZE = 1000  # elements of each input of a pointwise kernel
ROWS, COLUMNS = 8, 96  # of the inputs of reductions
M, N, K = 64, 48, 32  # of the matrix product


class Case(NamedTuple):
    fn: Any
    signature: dict[str, str]
    constants: dict[str, Any]
    grid: tuple[int, ...]
    options: dict[str, int]

    @property
    def pointers(self) -> list[str]:
        return [name for name, ty in self.signature.items() if ty.startswith("*")]

    def attrs(self, without: tuple[str, ...] = ()) -> dict[tuple[int, ...], Any]:
        """All arguments are divisible by 16 except the named ones."""
        names = list(self.signature)
        divisible = [name for name in names if name not in (*self.constants, *without)]
        return {(names.index(name),): [["tt.divisibility", 16]] for name in divisible}


@triton.jit
def pointwise(in_ptr0, in_ptr1, out_ptr0, xnumel, XBLOCK: tl.constexpr):
    """Many words,

    in several paragraphs.
    """
    xindex = tl.program_id(0) * XBLOCK + tl.arange(0, XBLOCK)[:]
    xmask = xindex < xnumel
    x0 = xindex
    tmp0 = tl.load(in_ptr0 + (x0), xmask)
    tmp1 = tl.load(in_ptr1 + (x0), xmask).to(tl.float32)
    tl.store(out_ptr0 + (x0), tmp0 * tmp1, xmask)


# fmt: off
@triton.jit
def oneline(in_ptr0, out_ptr0, XBLOCK: tl.constexpr): x = tl.arange(0, XBLOCK); tl.store(out_ptr0 + x, tl.load(in_ptr0 + x))  # noqa: E501, E702
# fmt: on


@triton.jit
def reduction(in_ptr0, out_ptr0, xnumel, r0_numel, XBLOCK: tl.constexpr, R0_BLOCK: tl.constexpr):
    xindex = tl.program_id(0) * XBLOCK + tl.arange(0, XBLOCK)[:, None]
    xmask = xindex < xnumel
    r0_base = tl.arange(0, R0_BLOCK)[None, :]
    _tmp2 = tl.full([XBLOCK, R0_BLOCK], 0, tl.float32)
    for r0_offset in tl.range(0, r0_numel, R0_BLOCK):
        r0_index = r0_offset + r0_base
        r0_mask = r0_index < r0_numel
        tmp0 = tl.load(in_ptr0 + (r0_index + 96 * xindex), r0_mask & xmask, eviction_policy="evict_first", other=0.0)
        _tmp2 = tl.where(r0_mask & xmask, _tmp2 + tmp0, _tmp2)
    tmp2 = tl.sum(_tmp2, 1)[:, None]
    tl.store(out_ptr0 + (xindex), tmp2, xmask)


@triton.jit
def persistent_reduction(in_out_ptr0, in_ptr0, xnumel, r0_numel, XBLOCK: tl.constexpr):
    R0_BLOCK: tl.constexpr = 128
    xindex = tl.program_id(0) * XBLOCK + tl.arange(0, XBLOCK)[:, None]
    xmask = xindex < xnumel
    r0_index = tl.arange(0, R0_BLOCK)[None, :]
    mask = (r0_index < r0_numel) & xmask
    tmp0 = tl.load(in_out_ptr0 + (r0_index + 96 * xindex), mask, other=0.0)
    tmp1 = tl.load(in_ptr0 + (r0_index), r0_index < r0_numel, eviction_policy="evict_last", other=0.0).to(tl.float32)
    tmp2 = tl.max(tl.where(mask, tmp0, float("-inf")), 1)[:, None]
    tl.store(in_out_ptr0 + (r0_index + 96 * xindex), (tmp0 - tmp2) * tmp1, mask)


@triton.jit
def matmul(
    arg_A,
    arg_B,  # a comment
    out_ptr0,
    ACC_TYPE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    A = arg_A
    B = arg_B
    M = 64
    N = 48
    K = 32
    element: tl.constexpr = arg_A.dtype.element_ty
    pid_n = tl.program_id(0) % tl.cdiv(N, BLOCK_N)
    pid_m = tl.program_id(0) // tl.cdiv(N, BLOCK_N)
    rm = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    rn = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    ram = tl.max_contiguous(tl.multiple_of(rm % M, BLOCK_M), BLOCK_M)
    rk = tl.arange(0, BLOCK_K)
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=ACC_TYPE)
    for k_idx in range(0, tl.cdiv(K, BLOCK_K)):
        rk_k = k_idx * BLOCK_K + rk
        a = tl.load(A + (rk_k[None, :] + K * ram[:, None]))
        b = tl.load(B + (rn[None, :] + N * rk_k[:, None]), rn[None, :] < N, other=0.0)
        acc += tl.dot(a, b.to(element), allow_tf32=False, out_dtype=ACC_TYPE)
    tl.store(out_ptr0 + (rn[None, :] + N * rm[:, None]), acc, (rm[:, None] < M) & (rn[None, :] < N))


@triton.jit
def scaled(x, by):
    return x * by + SCALE


@triton.jit
def advance(pointer, n, BLOCK: tl.constexpr):
    return pointer + tl.program_id(0) * BLOCK + tl.arange(0, BLOCK) % n


@triton.jit
def user(
    x_ptr: tl.tensor,
    flags_ptr,
    y_ptr: "*fp32",  # noqa: F722
    n,
    BLOCK: tl.constexpr = 256,
    STEPS: tl.constexpr = 2,
):
    # Names are reused, even in a loop, and pointers pass through functions.
    first = tl.program_id(0) * BLOCK * STEPS
    x_ptr += first
    y_ptr = y_ptr + first
    _language = tl.arange(0, BLOCK)
    for step in range(STEPS):
        mask = first + step * BLOCK + _language < n
        flag = tl.load(flags_ptr + first + step * BLOCK + _language, mask)
        value = scaled(tl.load(x_ptr + _language, mask), 2.0)
        tl.store(y_ptr + _language, tl.where(flag != 0, value, -value), mask)
        x_ptr += BLOCK
        y_ptr += BLOCK


def _case(fn: Any, types: list[str], constants: dict[str, Any], grid: int, **options: int) -> Case:
    signature = {**dict(zip(fn.arg_names, types, strict=False)), **dict.fromkeys(constants, "constexpr")}
    return Case(fn, signature, constants, (grid,), {"num_warps": 4, **options})


OF_MATMUL = {"ACC_TYPE": tl.float32, "BLOCK_M": 32, "BLOCK_N": 32, "BLOCK_K": 16}
CASES = {
    "pointwise": _case(pointwise, ["*fp32", "*bf16", "*fp32", "i32"], {"XBLOCK": 512}, 2),
    "oneline": _case(oneline, ["*i8", "*i64"], {"XBLOCK": 512}, 1),
    "reduction": _case(reduction, ["*fp32", "*fp32", "i32", "i32"], {"XBLOCK": 4, "R0_BLOCK": 64}, 2),
    "persistent_reduction": _case(persistent_reduction, ["*fp32", "*fp16", "i32", "i32"], {"XBLOCK": 4}, 2),
    "matmul": _case(matmul, ["*fp16", "*fp16", "*fp32"], OF_MATMUL, 4, num_stages=3),
    "user": _case(user, ["*fp32", "*i1", "*fp32", "i32"], {"BLOCK": 256, "STEPS": 2}, 2),
}


def import_without_compiler() -> None:
    """Makes ``variants`` importable without its package, which imports torch's compiler."""
    package = sys.modules["pygraph_trees.indirection"] = types.ModuleType("pygraph_trees.indirection")
    package.__path__ = [str(Path(__file__).resolve().parents[2] / "pygraph_trees" / "indirection")]
