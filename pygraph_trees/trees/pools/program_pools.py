"""The program's own memory pools, with ``torch.cuda.use_mem_pool`` around calls.

They would take memory of warm-ups and recordings too. A call that may be graphed is made :func:`outside`, so the
program's pool holds nothing of ours and can go at any time. Un-graphed code runs :func:`inside` again.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from pygraph_trees.native import binding

_Pool = tuple[int, tuple[int, int]]  # device and id

_used: dict[_Pool, int] = {}  # the pools in use, in the order in which they were begun, each with its thread


class _Left(threading.local):
    pools: Sequence[_Pool] = ()  # that the thread has left for a call


_left = _Left()


def begins(upstream: Callable[[int, Any], None]) -> Callable[[int, Any], None]:
    @functools.wraps(upstream)
    def begin(device: int, pool: Any) -> None:
        upstream(device, pool)
        _used[device, pool] = threading.get_ident()
        _tell()

    return begin


def ends(upstream: Callable[[int, Any], None]) -> Callable[[int, Any], None]:
    @functools.wraps(upstream)
    def end(device: int, pool: Any) -> None:
        _used.pop((device, pool), None)
        _tell()
        upstream(device, pool)

    return end


def are_used() -> bool:
    return bool(_used) and threading.get_ident() in _used.values()


@contextlib.contextmanager
def outside() -> Iterator[None]:
    """Inside this scope, no pool of the program takes this thread's allocations."""
    thread = threading.get_ident()
    found = [pool for pool, user in list(_used.items()) if user == thread]
    _end(found)
    before, _left.pools = _left.pools, found
    try:
        yield
    finally:
        _left.pools = before
        _begin(found)


def inside(run: Callable[[list[Any]], Any], inputs: list[Any]) -> Any:
    """Runs code whose memory comes from the pools that the thread has left for the call, if any."""
    if not (found := _left.pools):
        return run(inputs)
    _left.pools = ()
    try:
        _begin(found)
        return run(inputs)
    finally:
        _end(found)
        _left.pools = found


def _begin(found: Sequence[_Pool]) -> None:
    for device, pool in found:
        begins(torch._C._cuda_beginAllocateCurrentThreadToPool)(device, pool)
        torch._C._cuda_releasePool(device, pool)  # the program's own use counts already


def _end(found: Sequence[_Pool]) -> None:
    for device, pool in found:
        ends(torch._C._cuda_endAllocateToPool)(device, pool)


def _tell() -> None:
    """Lets C++ make no fast replay in this thread while a pool is used: it allocates own memory of outputs."""
    if binding.extension is not None:
        binding.extension.note_program_pool(are_used())
